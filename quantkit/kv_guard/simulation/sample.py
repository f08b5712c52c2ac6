"""What a guard leaves behind when it finds something, for who has no engine at hand: a small pool, and four faults."""

from pathlib import Path
from random import Random

import torch
from torch import Tensor

from quantkit.errors import ResourceError, UsageError
from quantkit.kv_guard.dump import Dump, write_dump
from quantkit.kv_guard.identity import PoolIdentity, owner_of
from quantkit.kv_guard.page_tags import PageTagTracker
from quantkit.kv_guard.settings import GuardSettings, PoolSize
from quantkit.kv_guard.tracker import Mode, Step, Verdict

INCIDENTS, DUMP, METRICS = "incidents.jsonl", "pool.safetensors", "kv.prom"
_PAGE_SIZE, _NUM_PAGES, _NUM_ROWS, _MOST_PAGES = 4, 32, 6, 4


def prepare(directory: Path) -> None:
    """Makes it where it is missing. Raises UsageError where a file of a sample is there already."""
    for name in (INCIDENTS, DUMP, METRICS):
        if (directory / name).exists():
            raise UsageError("exists already", remedy="name another directory", file=directory / name)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "name a directory that can be made"
        raise UsageError(f"cannot be made ({error.strerror})", remedy=remedy, file=directory) from error


def write_sample(directory: Path, seed: int) -> None:
    """Incidents, the pool as it was at the last of them, and metrics. One seed gives one dump, and but for the times
    that are in them one file of incidents and of metrics."""
    pool = _Pool(directory / INCIDENTS, Random(seed))
    try:
        _break(pool)
        pool.dump(directory / DUMP)
        (directory / METRICS).write_text(pool.tracker.metrics.text(), encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot be written ({error.strerror})", remedy="make room", file=directory) from error


class _Pool:
    """An engine's books, as far as faults need them."""

    def __init__(self, incidents: Path, random: Random) -> None:
        identity = PoolIdentity(model="sample", layout=f"simulated, pages of {_PAGE_SIZE}")
        size = PoolSize(num_pages=_NUM_PAGES, page_size=_PAGE_SIZE, num_rows=_NUM_ROWS, most_pages=_MOST_PAGES)
        settings = GuardSettings(
            identity=identity,
            size=size,
            mode=Mode.ABORT,
            incidents=incidents,
            secret=b"of a sample",
            first_generation=random.getrandbits(48) + 1,
        )
        self.tracker = PageTagTracker(settings)
        self.table = torch.zeros(_NUM_ROWS, _MOST_PAGES, dtype=torch.int32)
        self._free = random.sample(range(_NUM_PAGES), _NUM_PAGES)
        self._random = random
        self._lengths: dict[int, int] = {}

    def begin(self, row: int, request: str, num_tokens: int) -> None:
        """With pages for its prompt, which is its own."""
        tokens = [self._random.randrange(50_000) for _ in range(num_tokens)]
        chains = self.tracker.chains.of_prompt(tokens, _PAGE_SIZE, request)
        pages = _numbers(*(self._free.pop() for _ in chains))
        indices = torch.arange(len(chains))
        self.tracker.open(row, request)
        self.tracker.grant(
            pages, torch.full_like(indices, row), indices, _numbers(*(owner_of(chain) for chain in chains))
        )
        self.table[row, : len(chains)] = pages
        self._lengths[row] = num_tokens

    def end(self, row: int, pages_left: tuple[int, ...]) -> None:
        """Whom the guard ended: it gives back what is still its own."""
        for index in pages_left:
            self.release(row, index)
        self.tracker.close(row)
        del self._lengths[row]

    def reach(self, row: int, num_tokens: int) -> None:
        """The row is read so far, whether or not it has pages for it."""
        self._lengths[row] = num_tokens

    def release(self, row: int, index: int) -> None:
        """It is free while the row's table has it: a fault where a step reads it. Whoever comes next gets it."""
        page = int(self.table[row, index])
        self.tracker.release(_numbers(page))
        self._free.append(page)

    def run(self, writes: tuple[int, int, int] | None = None) -> Verdict:
        """A step of all rows, which stores a token in the slot, of the row, at the position of ``writes``."""
        step = self.tracker.before_step(self._step())
        if writes:
            self.tracker.check_writes(*(_numbers(one) for one in writes))
        self.tracker.after_step()
        return self.tracker.verdict(step)

    def dump(self, path: Path) -> None:
        write_dump(path, Dump.of(self.tracker, self._step()))

    def _step(self) -> Step:
        lengths = self._lengths.values()
        most_pages = -(-max(lengths) // _PAGE_SIZE)
        return Step(table=self.table, rows=_numbers(*self._lengths), lengths=_numbers(*lengths), most_pages=most_pages)


def _break(pool: _Pool) -> None:
    """A step without a fault, one with a fault, and one with three."""
    for row, (request, num_tokens) in enumerate([("chat-17", 10), ("chat-18", 8), ("agent-2", 7), ("batch-4", 5)]):
        pool.begin(row, request, num_tokens)
    verdict = pool.run()
    assert not verdict.violations, verdict
    pool.release(0, 1)
    verdict = pool.run()
    assert verdict.aborted == ("chat-17",), verdict
    pool.end(0, pages_left=(0, 2))
    pool.release(1, 1)
    pool.begin(4, "batch-5", 6)  # in the page that chat-18 still reads
    pool.reach(2, 9)  # a page more than it was granted
    position = 4
    slot = int(pool.table[3, position // _PAGE_SIZE]) * _PAGE_SIZE + position % _PAGE_SIZE
    verdict = pool.run(writes=(slot + 2, 3, position))
    assert set(verdict.aborted) == {"chat-18", "agent-2", "batch-4"}, verdict


def _numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
