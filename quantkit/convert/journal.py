"""What a run has finished, written down so that the next one goes on from there.

``journal-R.jsonl`` belongs to rank R: a line for each output shard and each source shard that is done, with their
hashes, durable before it counts. A line begins with its own checksum, which the run that it belongs to is part of
(``run.py``); from the first that is not whole on, nothing is believed.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from quantkit.checkpoint.disk import flush, named_errors, write_bytes
from quantkit.checkpoint.file_names import RUN_NAME
from quantkit.errors import UsageError
from quantkit.integrity.manifest import FileRecord
from quantkit.integrity.weighed_errors import WeighedError
from quantkit.integrity.weight_errors import WeightError

JOURNALS = "journal-*.jsonl"
_CHECKSUM_CHARACTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """A source shard that was read and hashed. ``stamp``: what it was known by then."""

    record: FileRecord
    stamp: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputEntry:
    """An output shard that is on the disk. ``inputs``: stamps of the source shards that it was made from.

    ``weighed``: errors as importance weighs them, of the weights that it speaks of.
    """

    record: FileRecord
    inputs: Mapping[str, str]
    errors: tuple[WeightError, ...]
    weighed: tuple[WeighedError, ...] = ()


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
            weighed = tuple(
                WeighedError(name=one[0], error2=one[1], plain2=one[2], weight2=one[3])
                for one in line.get("weighed", ())
            )
            self.outputs[line["output"]] = OutputEntry(
                record=record, inputs=line["inputs"], errors=errors, weighed=weighed
            )


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
            self._descriptor = open_plain(self.path, os.O_CREAT | os.O_RDWR)
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
        weighed = [[error.name, error.error2, error.plain2, error.weight2] for error in entry.weighed]
        self.has_output = True
        line = {"output": name, **entry.record.document(), "inputs": dict(entry.inputs), "errors": errors}
        self._append(line | ({"weighed": weighed} if weighed else {}))

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
    for path in sorted(work.glob(JOURNALS)):
        with named_errors(path):
            descriptor = open_plain(path, os.O_RDONLY)
            try:
                for line, _ in _lines(descriptor, run_id(work)):
                    entries.add(line)
            finally:
                os.close(descriptor)
    return entries


def run_id(work: Path) -> str:
    """Of the run that was begun here: no other believes its journals."""
    return hashlib.sha256((work / RUN_NAME).read_bytes()).hexdigest()


def open_plain(path: Path, flags: int) -> int:
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
        and _is_table(errors, [str, str, float, float])
        and _is_table(line.get("weighed", []), [str, float, float, float])
    )


def _is_table(rows: Any, types: list[type]) -> bool:
    return isinstance(rows, list) and all(isinstance(one, list) and list(map(type, one)) == types for one in rows)
