"""A pool's tags, expectations and page table in one safetensors file, to be looked at later and elsewhere."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from quantkit.errors import UsageError
from quantkit.kv_guard.dispatch import Expectations, PageTags
from quantkit.kv_guard.identity import TAG_VERSION, PoolIdentity
from quantkit.kv_guard.page_tags import PageTagTracker
from quantkit.kv_guard.settings import PoolSize
from quantkit.kv_guard.tracker import Step

FORMAT = "quantkit-kv-dump"
_MOST_DUMPS = 100  # of one name


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """What lay on the device. ``names`` are the requests of rows; ``step`` the batch that was about to run."""

    identity: PoolIdentity
    size: PoolSize
    tags: PageTags
    expectations: Expectations
    step: Step
    names: Mapping[int, str]

    @classmethod
    def of(cls, tracker: PageTagTracker, step: Step) -> "Dump":
        """As its pool is by now."""
        return cls(
            identity=tracker.settings.identity,
            size=tracker.settings.size,
            tags=tracker.tags,
            expectations=tracker.expectations,
            step=step,
            names=tracker.names,
        )


def write_dump(path: Path, dump: Dump, *, is_numbered: bool = False) -> Path:
    """Returns the file; where ``path`` exists, and ``is_numbered``, it is the next free one, as pool.2.safetensors.

    Raises UsageError where no name is free. Waits for the device.
    """
    tensors, metadata = _parts(dump)
    free = _claimed(path, _MOST_DUMPS if is_numbered else 1)
    try:
        save_file(tensors, free, metadata=metadata)
    except BaseException:
        free.unlink(missing_ok=True)
        raise
    return free


def _claimed(path: Path, most: int) -> Path:
    """The first name that nobody has, as an empty file: another process may look for one at the same time."""
    for number in range(1, most + 1):
        candidate = path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")
        try:
            candidate.open("xb").close()
        except FileExistsError:
            continue
        return candidate
    what = "exists already" if most == 1 else f"exists already, and so do {most - 1} more beside it"
    raise UsageError(what, remedy="name another file, or move it away", file=path)


def digest_of(tensors: Mapping[str, Tensor], document: str) -> str:
    """Sha256 of all that a dump says: its ``document``, and each tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(document.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _parts(dump: Dump) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file."""
    step = dump.step
    tensors = {
        "seals": dump.tags.seals_P,
        "records": dump.tags.records_P3,
        "states": dump.tags.states_P,
        "expected_seals": dump.expectations.seals_RL,
        "expected_details": dump.expectations.details_RL2,
        "table": step.table,
        "rows": step.rows.long(),
        "lengths": step.lengths.long(),
    }
    if step.firsts is not None:
        tensors["firsts"] = step.firsts.long()
    document = {
        "identity": asdict(dump.identity),
        "size": asdict(dump.size),
        "by_token": step.by_token,
        "names": {str(row): name for row, name in dump.names.items()},
    }
    text = json.dumps(document, sort_keys=True)
    here = {name: one.cpu().contiguous() for name, one in tensors.items()}
    metadata = {"format": FORMAT, "version": str(TAG_VERSION), "pool": text, "sha256": digest_of(here, text)}
    return here, metadata
