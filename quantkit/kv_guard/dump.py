"""A pool's tags, expectations and page table in one safetensors file, to be looked at later and elsewhere."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quantkit.errors import QuantkitError, SourceError, UsageError, first_line
from quantkit.kv_guard.dispatch import (
    FREE_INDEX,
    MOST_PAGES,
    PLACE_MASK,
    SPOILED,
    UNARRIVED,
    Expectations,
    PageTags,
    State,
    new_ring,
    twins,
)
from quantkit.kv_guard.identity import TAG_VERSION, PoolIdentity
from quantkit.kv_guard.settings import PoolSize
from quantkit.kv_guard.tracker import Step
from quantkit.kv_guard.violations import Violation, read_line

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpReport:
    """``torn``, ``spoiled`` and ``stray`` are pages: whose seal is not that of their record, which somebody wrote who
    did not hold it, and whole ones of nobody that is known. ``num_awaiting``: held, and a transfer may write them."""

    num_held: int
    num_awaiting: int
    num_shared: int
    num_free: int
    num_checked: int
    violations: tuple[Violation, ...]
    torn: tuple[int, ...]
    spoiled: tuple[int, ...]
    stray: tuple[int, ...]

    @property
    def is_sound(self) -> bool:
        """Stray pages are a leak or a node's own: no request reads them, nor a spoiled page that is no violation."""
        return not (self.violations or self.torn)

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "pages": {
                "held": self.num_held,
                "awaiting": self.num_awaiting,
                "shared": self.num_shared,
                "free": self.num_free,
            },
            "checked": self.num_checked,
            "violations": [one.document() for one in self.violations],
            "torn": list(self.torn),
            "spoiled": list(self.spoiled),
            "stray": list(self.stray),
        }


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


def read_dump(path: Path) -> Dump:
    """Raises SourceError for what this version did not write, and for what has been cut or changed since."""
    if not path.is_file():
        raise SourceError("is no file", remedy="name a dump of the guard's", file=path)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, OSError) as error:
        raise SourceError(f"cannot be read: {first_line(error)}", remedy="dump the pool again", file=path) from error
    if metadata.get("format") != FORMAT:
        raise SourceError("is no dump of KV page tags", remedy="name a dump of the guard's", file=path)
    if metadata.get("version") != str(TAG_VERSION):
        raise SourceError(
            f"its tags are of version {metadata.get('version')}, this is {TAG_VERSION}",
            remedy="inspect it with the version that wrote it",
            file=path,
        )
    try:
        if digest_of(tensors, metadata["pool"]) != metadata["sha256"]:
            raise SourceError("is damaged: it is not what was written", remedy="dump the pool again")
        document = json.loads(metadata["pool"])
        identity = PoolIdentity(**document["identity"])
        size = PoolSize(**document["size"])
        names = {int(row): str(name) for row, name in document["names"].items()}
        return _checked_dump(tensors, identity, size, names, bool(document["by_token"]))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SourceError(
            f"a part of it is missing or is another: {first_line(error)}", remedy="dump the pool again", file=path
        ) from error
    except QuantkitError as error:
        error.file = str(path)
        raise


def _checked_dump(
    tensors: dict[str, Tensor], identity: PoolIdentity, size: PoolSize, names: dict[int, str], by_token: bool
) -> Dump:
    for field in fields(PoolSize):
        if type(getattr(size, field.name)) is not int:
            raise TypeError(f"size.{field.name} is {getattr(size, field.name)!r}")
        if not (-1 if field.name == "null_page" else 1) <= getattr(size, field.name) < MOST_PAGES:
            raise ValueError(f"size.{field.name} is {getattr(size, field.name)}")
    table = tensors["table"]
    if table.ndim != 2 or not table.shape[1]:
        raise SourceError(f"table is {tuple(table.shape)}", tensor="table", remedy="dump the pool again")
    batch = min(tensors["rows"].numel(), size.num_rows)
    for name, dtype, shape in (
        ("seals", torch.int64, (size.num_pages,)),
        ("records", torch.int64, (size.num_pages, 3)),
        ("states", torch.int32, (size.num_pages,)),
        ("expected_seals", torch.int64, (size.num_rows, size.most_pages)),
        ("expected_details", torch.int64, (size.num_rows, size.most_pages, 2)),
        ("table", table.dtype, (size.num_rows, table.shape[-1])),
        ("rows", torch.int64, (batch,)),
        ("lengths", torch.int64, (batch,)),
        *([("firsts", torch.int64, (batch,))] if "firsts" in tensors else []),
    ):
        if tensors[name].dtype != dtype or tuple(tensors[name].shape) != shape:
            found = f"{tensors[name].dtype} {tuple(tensors[name].shape)}"
            raise SourceError(f"{name} is {found}, not {dtype} {shape}", tensor=name, remedy="dump the pool again")
    rows, lengths = tensors["rows"], tensors["lengths"]
    is_batch = (rows >= 0) & (rows < size.num_rows) & (lengths >= 0)
    is_batch &= lengths <= size.most_pages * size.page_size
    if table.dtype not in (torch.int32, torch.int64) or not bool(is_batch.all()):
        raise SourceError("rows or lengths that the pool does not have", tensor="rows", remedy="dump the pool again")
    most = int((lengths.max() + size.page_size - 1) // size.page_size) if batch else 0
    return Dump(
        identity=identity,
        size=size,
        tags=PageTags(seals_P=tensors["seals"], records_P3=tensors["records"], states_P=tensors["states"]),
        expectations=Expectations(seals_RL=tensors["expected_seals"], details_RL2=tensors["expected_details"]),
        step=Step(
            table=table,
            rows=rows,
            lengths=lengths,
            firsts=tensors.get("firsts"),
            most_pages=most,
            by_token=by_token,
        ),
        names=names,
    )


def check_dump(dump: Dump) -> DumpReport:
    """All pages of the batch as the guard checks them, and every tag against itself."""
    step, size = dump.step, dump.size
    ring = new_ring(max(len(step.rows) * step.most_pages, 1))
    twins.check_pages(
        dump.tags,
        dump.expectations,
        ring,
        step.table,
        step.rows,
        step.lengths,
        step.firsts,
        page_size=size.page_size,
        by_token=step.by_token,
        most_pages=step.most_pages,
        step=0,
        null_page=size.null_page,
    )
    lines = ring.lines_KW[: int(ring.count_1[0])].tolist()
    pages = torch.arange(size.num_pages)
    is_free = (dump.tags.records_P3[:, 2] & PLACE_MASK) == FREE_INDEX
    is_whole = dump.tags.seals_P == twins.record_seals(dump.tags.records_P3) ^ twins.mark_of(pages)
    unmarked = dump.tags.seals_P ^ twins.mark_of(pages)
    is_spoiled = unmarked == SPOILED
    states_P = dump.tags.states_P
    is_known = (states_P >= State.FREE) & (states_P <= State.AWAITING)
    is_waiting = (states_P == State.AWAITING) | ((unmarked == UNARRIVED) & (states_P != State.FREE))
    is_torn = ~is_spoiled & ~is_waiting & (~is_whole | ~is_known | (is_free != (states_P == State.FREE)))
    expected = set(dump.expectations.seals_RL.flatten().tolist())
    found, states = unmarked.tolist(), Counter(states_P.tolist())
    return DumpReport(
        num_held=states[State.HELD] + states[State.AWAITING],
        num_awaiting=states[State.AWAITING],
        num_shared=states[State.SHARED],
        num_free=states[State.FREE],
        num_checked=int(((step.lengths + size.page_size - 1) // size.page_size).sum()),
        violations=tuple(
            read_line(line, dump.names, num_pages=size.num_pages, page_size=size.page_size) for line in lines
        ),
        torn=tuple(pages[is_torn].tolist()),
        spoiled=tuple(pages[is_spoiled].tolist()),
        stray=tuple(
            page
            for page in pages[(states_P == State.HELD) & ~is_torn & ~is_spoiled].tolist()
            if found[page] not in expected
        ),
    )
