"""Files as a guarded server leaves them, of a small pool with two faults.

Whoever has no server yet can try `explain` and `inspect` on them.
"""

from pathlib import Path

import torch

from quantkit.errors import UsageError
from quantkit.kv_guard.dump import Dump, write_dump
from quantkit.kv_guard.identity import PoolIdentity, owner_of
from quantkit.kv_guard.page_tags import PageTagTracker
from quantkit.kv_guard.settings import GuardSettings, PoolSize
from quantkit.kv_guard.simulation.events import numbers
from quantkit.kv_guard.tracker import Mode, Step

_PAGE_SIZE, _NUM_TOKENS = 64, 200  # of a page, and of each request
_PAGES = {0: ("alice", [3, 7, 8, 9]), 1: ("bob", [4, 10, 11, 12]), 2: ("carol", [5, 6, 13, 14])}  # by row


def write_samples(folder: Path) -> tuple[Path, Path, Path]:
    """``incidents.jsonl``, ``pool.safetensors`` and ``kv.prom``. Raises UsageError where one of them exists.

    Alice's row names a page of bob's, and a page of carol's is released while she reads it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "incidents.jsonl", folder / "pool.safetensors", folder / "kv.prom"
    for path in files:
        if path.exists():
            raise UsageError("exists already", remedy="name another folder", file=path)
    size = PoolSize(num_pages=16, page_size=_PAGE_SIZE, num_rows=len(_PAGES), most_pages=4)
    tracker = PageTagTracker(
        GuardSettings(
            identity=PoolIdentity(model="a sample", layout=f"a sample's, pages of {_PAGE_SIZE}"),
            size=size,
            mode=Mode.ABORT,
            incidents=files[0],
            secret=b"of a sample",
            first_generation=1,
        )
    )
    for row, (name, pages) in _PAGES.items():
        chains = tracker.chains.of_prompt([row] * _NUM_TOKENS, _PAGE_SIZE, name)
        owners = numbers([owner_of(chain) for chain in chains])
        tracker.open(row, name)
        tracker.grant(numbers(pages), numbers([row] * len(pages)), torch.arange(len(pages)), owners)
    table = torch.tensor([pages for _, pages in _PAGES.values()], dtype=torch.int32)
    table[0, 1] = 10
    tracker.release(numbers([6]))
    rows = torch.arange(len(_PAGES))
    step = Step(table=table, rows=rows, lengths=torch.full_like(rows, _NUM_TOKENS), most_pages=4)
    number = tracker.before_step(step)
    tracker.after_step()
    tracker.verdict(number)
    names = {row: name for row, (name, _) in _PAGES.items()}
    write_dump(
        files[1],
        Dump(
            identity=tracker.settings.identity,
            size=size,
            tags=tracker.tags,
            expectations=tracker.expectations,
            step=step,
            names=names,
        ),
    )
    files[2].write_text(tracker.metrics.text(), encoding="utf-8")
    return files
