"""What a run has finished, written down so that the next one goes on from there.

``run.json`` says what the run is: whoever comes with something else is refused. ``journal-R.jsonl`` belongs to rank R:
a line for each output shard and each source shard that is done, with their hashes, durable before it counts. A line
begins with its own checksum; from the first that is not whole on, nothing is believed.
"""

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from quantkit import __version__
from quantkit.checkpoint.disk import flush, named_errors, write_bytes, write_file
from quantkit.checkpoint.file_names import RUN_NAME
from quantkit.checkpoint.json_files import read_json
from quantkit.errors import UsageError
from quantkit.integrity.manifest import FileRecord
from quantkit.integrity.weight_errors import WeightError
from quantkit.plan.plan import Plan, PlannedShard
from quantkit.recipe import recipe_document

_DRAFT_NAME, _LOCK_NAME = f"{RUN_NAME}.draft", "run.lock"
_FORMAT = 1
_CHECKSUM_CHARACTERS = 16
_MOST_DIFFERENCES = 3
MOST_RANKS = 4096
_CONSEQUENCES = ("outputs.", "source.shards.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """A source shard that was read and hashed. ``stamp``: what it was known by then."""

    record: FileRecord
    stamp: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputEntry:
    """An output shard that is on the disk. ``inputs``: stamps of the source shards that it was made from."""

    record: FileRecord
    inputs: Mapping[str, str]
    errors: tuple[WeightError, ...]


@dataclass(slots=True)
class Entries:
    """Of one journal or of several together, by the shard's name."""

    sources: dict[str, SourceEntry] = field(default_factory=dict)
    outputs: dict[str, OutputEntry] = field(default_factory=dict)
    stamped: dict[tuple[str, str], FileRecord] = field(default_factory=dict)  # of a source by every stamp it had

    def add(self, line: Mapping[str, Any]) -> None:
        """What a line says."""
        record = FileRecord(file_bytes=line["bytes"], sha256=line["sha256"])
        if "source" in line:
            self.sources[line["source"]] = SourceEntry(record=record, stamp=line["stamp"])
            self.stamped[line["source"], line["stamp"]] = record
        else:
            errors = tuple(
                WeightError(name=one[0], role=one[1], error2=one[2], weight2=one[3]) for one in line["errors"]
            )
            self.outputs[line["output"]] = OutputEntry(record=record, inputs=line["inputs"], errors=errors)


class Recorder(Protocol):
    """Who is told of each shard that is finished."""

    def add_source(self, name: str, entry: SourceEntry) -> None:
        """A source shard is hashed."""

    def add_output(self, name: str, entry: OutputEntry) -> None:
        """An output shard is on the disk."""


class Journal:
    """The journal of one rank, open for more lines. ``found``: what it held already; ``has_output``: more came."""

    def __init__(self, work: Path, rank: int = 0) -> None:
        self.path = journal_path(work, rank)
        self.found = Entries()
        self.has_output = False
        good_bytes = 0
        self._run_id = run_id(work)
        with named_errors(self.path):
            self._descriptor = _open_plain(self.path, os.O_CREAT | os.O_RDWR)
            for line, end in _lines(self._descriptor, self._run_id):
                self.found.add(line)
                good_bytes = end
            os.ftruncate(self._descriptor, good_bytes)
            os.lseek(self._descriptor, good_bytes, os.SEEK_SET)
            flush(work)

    def add_source(self, name: str, entry: SourceEntry) -> None:
        """A source shard is hashed."""
        self._append({"source": name, **entry.record.document(), "stamp": entry.stamp})

    def add_output(self, name: str, entry: OutputEntry) -> None:
        """An output shard is on the disk, and so is its name."""
        errors = [[error.name, error.role, error.error2, error.weight2] for error in entry.errors]
        self.has_output = True
        self._append({"output": name, **entry.record.document(), "inputs": dict(entry.inputs), "errors": errors})

    def close(self) -> None:
        """Nothing more is added."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line)
        with named_errors(self.path):
            write_bytes(self._descriptor, f"{_checksum(self._run_id, text)} {text}\n".encode())
            os.fsync(self._descriptor)


def journal_path(work: Path, rank: int) -> Path:
    """Of a rank."""
    return work / f"journal-{rank}.jsonl"


def read_journals(work: Path) -> Entries:
    """What all ranks together have finished."""
    entries = Entries()
    for path in sorted(work.glob("journal-*.jsonl")):
        with named_errors(path):
            descriptor = _open_plain(path, os.O_RDONLY)
            try:
                for line, _ in _lines(descriptor, run_id(work)):
                    entries.add(line)
            finally:
                os.close(descriptor)
    return entries


def run_id(work: Path) -> str:
    """Of the run that was begun here: no other believes its journals."""
    return hashlib.sha256((work / RUN_NAME).read_bytes()).hexdigest()


def _open_plain(path: Path, flags: int) -> int:
    """A file of its own: nothing that others wait behind, and nothing that lies elsewhere too."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(descriptor)
        raise UsageError("is no plain file of ours", file=path, remedy="remove it, or choose another -o")
    return descriptor


def _checksum(run: str, text: str) -> str:
    return hashlib.sha256(f"{run} {text}".encode()).hexdigest()[:_CHECKSUM_CHARACTERS]


def _lines(descriptor: int, run: str) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Whole lines from the beginning, and where each ends in the file."""
    end = 0
    with os.fdopen(os.dup(descriptor), "rb") as stream:
        for raw in stream:
            checksum, _, text = raw.decode(errors="replace").partition(" ")
            if not text.endswith("\n") or _checksum(run, text[:-1]) != checksum:
                return
            line = json.loads(text)
            if not _is_line(line):
                return
            end += len(raw)
            yield line, end


def _is_line(line: Any) -> bool:
    """Whether it says what ``Entries`` takes: a checksum is right for whoever knows how it is made."""
    if not isinstance(line, dict) or type(line.get("bytes")) is not int or not isinstance(line.get("sha256"), str):
        return False
    if "source" in line:
        return isinstance(line["source"], str) and isinstance(line.get("stamp"), str)
    errors, inputs = line.get("errors"), line.get("inputs")
    return (
        isinstance(line.get("output"), str)
        and isinstance(inputs, dict)
        and all(isinstance(one, str) for one in inputs.values())
        and isinstance(errors, list)
        and all(isinstance(one, list) and list(map(type, one)) == [str, str, float, float] for one in errors)
    )


def run_document(plan: Plan, provenance: Mapping[str, str], *, world_size: int) -> dict[str, Any]:
    """What makes a run this one: the tool, its limits, the recipe, the source's config and headers, every decision."""
    checkpoint = plan.checkpoint
    return {
        "format": _FORMAT,
        "version": __version__,
        "partial": None if plan.partial is None else plan.partial.document(),
        "recipe": recipe_document(plan.recipe),
        "world_size": world_size,
        "is_incomplete": plan.is_incomplete,
        "source": {
            **provenance,
            "config": _digest(checkpoint.config, checkpoint.quantization),
            "sidecars": _digest([[one.name, one.file_bytes] for one in checkpoint.sidecars.copied]),
            "shards": {
                shard.name: _digest(shard.file_bytes, [[one.name, str(one.spec), one.begin] for one in shard.tensors])
                for shard in checkpoint.shards
            },
        },
        "outputs": {shard.name: _decisions(shard) for shard in plan.shards},
    }


def _decisions(shard: PlannedShard) -> str:
    jobs = [[job.weight.name, job.action, str(job.scheme)] for job in shard.jobs]
    return _digest(jobs, {name: str(spec) for name, spec in shard.specs.items()})


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def begin_run(work: Path, document: Mapping[str, Any]) -> None:
    """Write down what the run is, or compare with what is written. Raises UsageError that names what differs."""
    path = work / RUN_NAME
    content = json.dumps(document).encode()
    with named_errors(path), _alone(work):
        if not path.exists():
            for journal in work.glob("journal-*.jsonl"):  # of a run that nobody knows any more
                journal.unlink()
            draft = work / _DRAFT_NAME
            draft.unlink(missing_ok=True)
            write_file(draft, content)
            draft.rename(path)
            flush(work)
        there = read_json(path, what="a run that was begun has it")
    differences = list(_differences(there, json.loads(content)))
    # what follows from another recipe or another limit is no news beside it
    differences = [one for one in differences if not one.startswith(_CONSEQUENCES)] or differences
    if differences:
        shown = "; ".join(differences[:_MOST_DIFFERENCES])
        more = f"; and {len(differences) - _MOST_DIFFERENCES} more" if len(differences) > _MOST_DIFFERENCES else ""
        raise UsageError(
            f"holds work of a run that differs: {shown}{more}",
            file=work.parent,
            remedy=_same_revision(there)
            + "repeat that run's command, or choose another -o; to start over, "
            + ("give --no-resume" if max(document["world_size"], _ranks_of(there)) == 1 else "remove the directory"),
        )


def _same_revision(there: Mapping[str, Any]) -> str:
    """A branch of the hub moves; the commit that it stood for can be named."""
    source = there.get("source")
    if not isinstance(source, Mapping) or not (source.get("hub_id") and source.get("commit")):
        return ""
    return f"to go on with its revision, convert {source['hub_id']}@{source['commit']}; or "


def _ranks_of(document: Mapping[str, Any]) -> int:
    world_size = document.get("world_size")
    return world_size if type(world_size) is int else 1


def begun_world_size(work: Path) -> int:
    """Ranks of the run that has begun here. Raises UsageError where none has."""
    path = work / RUN_NAME
    if not path.is_file():
        raise UsageError("holds no run", file=work.parent, remedy="run the ranks first, with the same -o")
    world_size = read_json(path, what="a run that was begun has it").get("world_size")
    if type(world_size) is not int or not 1 <= world_size <= MOST_RANKS:
        raise UsageError(f"says world_size {_short(world_size)}", file=path, remedy="give --no-resume to start over")
    return world_size


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Ranks begin at the same time: one after the other."""
    lock = os.open(work / _LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _differences(there: Any, here: Any, place: str = "") -> Iterator[str]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in dict.fromkeys((*there, *here)):
            inner = f"{place}.{key}" if place else str(key)
            if key not in here:
                yield f"{inner} is no longer there"
            elif key not in there:
                yield f"{inner} is new"
            else:
                yield from _differences(there[key], here[key], inner)
    elif there != here:
        is_digest = isinstance(there, str) and len(there) == len(_digest()) and place != "source.commit"
        yield f"{place} has changed" if is_digest else f"{place} was {_short(there)} and is {_short(here)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
