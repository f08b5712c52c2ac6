"""Source shards that pass through a bounded place on the disk: fetched ahead, checked, converted, dropped.

A weight's scale may lie in another shard than its codes. Such spans are kept apart, in a small file for each shard that
needs them: copied out of the other shard where that comes first, else fetched by range, and compared when it comes.
"""

import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Lock

from quantkit.checkpoint.disk import is_own_directory, named_errors, remove, write_bytes
from quantkit.checkpoint.file_names import CONFIG_NAME, HUB_CLIENT_NAME
from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.hub import Repository, fetch_file, forget_file, read_range
from quantkit.checkpoint.reader import read_bytes
from quantkit.checkpoint.source import Checkpoint, Shard
from quantkit.errors import SourceError, UsageError
from quantkit.integrity.manifest import FileRecord, record_of
from quantkit.machine import bytes_text
from quantkit.plan.plan import Job, Plan, PlannedShard
from quantkit.tensors import U8, TensorSpec

NUM_FETCHERS = 4
_SPANS_NAME = "spans"
_PIECE_BYTES = 16 << 20  # of a span, in one request
_NEAR_BYTES = 64 << 10  # spans so near to each other are fetched as one


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``[begin, end)`` of a source shard; ``place`` is where they begin in the file of spans."""

    shard: str
    begin: int
    end: int
    place: int


def foreign_spans(shard: PlannedShard) -> tuple[Span, ...]:
    """What the jobs of an output shard need of other source shards than their own, joined where it is near."""
    wanted: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for part in _parts(shard.jobs):
        if part.path.name != shard.name and part.spec.num_bytes:
            wanted[part.path.name].append((part.begin, part.end))
    spans, place = [], 0
    for name in sorted(wanted):
        for begin, end in _joined(sorted(wanted[name])):
            spans.append(Span(name, begin, end, place))
            place += end - begin
    return tuple(spans)


def _parts(jobs: Iterable[Job]) -> Iterator[StoredTensor]:
    for job in jobs:
        yield from job.weight.parts.values()


def _joined(runs: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    first, last = runs[0]
    for begin, end in runs[1:]:
        if begin > last + _NEAR_BYTES:
            yield first, last
            first, last = begin, end
        last = max(last, end)
    yield first, last


@dataclass(slots=True, kw_only=True)
class Spool:
    """``directory`` holds at most ``most_bytes`` of source shards (or one), and the spans beside them.

    ``shards`` are those that are still to be made. Room is booked in one thread; ``fetch`` may run in several.
    """

    repository: Repository
    directory: Path
    most_bytes: int
    shards: Mapping[str, PlannedShard] = field(default_factory=dict)
    _spans: dict[str, tuple[Span, ...]] = field(default_factory=dict)
    _digests: dict[tuple[str, Span], str] = field(default_factory=dict)
    _booked: dict[str, int] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def expect(self, plan: Plan, only: Collection[str]) -> None:
        """Make ready for the shards of ``only``. Raises UsageError where one of them is too large."""
        self.shards = {shard.name: shard for shard in plan.shards if shard.name in only}
        self._spans = {name: foreign_spans(shard) for name, shard in self.shards.items()}
        self._check_room(source for source in plan.checkpoint.shards if source.name in self.shards)
        with named_errors(self.directory):
            self._clean()

    def with_small_files(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint as it lies here, its config and sidecars fetched: for whoever completes the output."""
        place, sidecars = checkpoint.directory, checkpoint.sidecars
        copied = [replace(one, path=self.files / one.path.relative_to(place).as_posix()) for one in sidecars.copied]
        for path in (self.files / CONFIG_NAME, *(one.path for one in copied)):
            self._fetch_checked(path.relative_to(self.files).as_posix(), None, Event())
        return replace(checkpoint, directory=self.files, sidecars=replace(sidecars, copied=tuple(copied)))

    @property
    def files(self) -> Path:
        """What the hub has, under its names."""
        return self.directory / "files"

    def _check_room(self, sources: Iterable[Shard]) -> None:
        largest = max(sources, key=lambda source: source.file_bytes, default=None)
        if largest is not None and largest.file_bytes > self.most_bytes:
            raise UsageError(
                f"the spool of {bytes_text(self.most_bytes)} does not hold the largest shard: {largest.name} has "
                f"{bytes_text(largest.file_bytes)}",
                remedy="give more with --spool-gib",
            )

    def _clean(self) -> None:
        """Of what an earlier run left, keep shards whose hash the hub lists, if they fit: they are hashed again.

        No link is followed, and none stays.
        """
        for place in (self.directory, self.files, self.directory / _SPANS_NAME):
            if place.is_symlink():
                place.unlink()
            place.mkdir(exist_ok=True)
        shutil.rmtree(self.directory / _SPANS_NAME)
        (self.directory / _SPANS_NAME).mkdir()
        kept = {path: path.stat().st_size for path in self.files.iterdir() if self._is_worth_keeping(path)}
        for path in self.files.iterdir():
            if path.name == HUB_CLIENT_NAME and is_own_directory(path):
                continue  # where begun downloads lie
            if path not in kept or sum(kept.values()) > self.most_bytes:
                remove(path)
        for path in self.files.rglob("*"):
            if path.is_symlink():
                path.unlink()

    def _is_worth_keeping(self, path: Path) -> bool:
        listed = self.repository.files.get(path.name)
        is_plain = not path.is_symlink() and path.is_file() and path.stat().st_nlink == 1
        return is_plain and path.name in self.shards and listed is not None and listed.sha256 is not None

    def has_room(self, source: Shard) -> bool:
        """Whether one more fits; one always does."""
        return not self._booked or sum(self._booked.values()) + source.file_bytes <= self.most_bytes

    def book(self, source: Shard) -> None:
        """Keep room for a shard that is about to be fetched."""
        self._booked[source.name] = source.file_bytes

    def drop(self, name: str) -> None:
        """A shard is done with."""
        self._booked.pop(name, None)
        forget_file(self.files, name)
        self._spans_path(name).unlink(missing_ok=True)

    def fetch(self, source: Shard, stop: Event) -> FileRecord:
        """Bring a shard and its foreign spans. Raises SourceError for what the hub does not say it is."""
        with self._lock:
            for span in self._spans.get(source.name, ()):
                if (source.name, span) not in self._digests:
                    self._keep(source.name, span, self._ranges(span, stop))
        record = self._fetch_checked(source.name, source.file_bytes, stop)
        with self._lock:
            for name, spans in self._spans.items():
                for span in spans:
                    if span.shard == source.name:
                        self._serve(name, span)
        return record

    def localized(self, shard: PlannedShard) -> PlannedShard:
        """The same with its parts where they lie here."""
        jobs = []
        for job in shard.jobs:
            parts = {key: self._localized(shard.name, part) for key, part in job.weight.parts.items()}
            jobs.append(job._replace(weight=job.weight._replace(parts=parts)))
        return replace(shard, jobs=tuple(jobs))

    def _localized(self, name: str, part: StoredTensor) -> StoredTensor:
        if part.path.name == name or not part.spec.num_bytes:
            return part._replace(path=self.files / part.path.name)
        span = next(
            one for one in self._spans[name] if one.shard == part.path.name and one.begin <= part.begin < one.end
        )
        return part._replace(path=self._spans_path(name), begin=span.place + part.begin - span.begin)

    def _spans_path(self, name: str) -> Path:
        return self.directory / _SPANS_NAME / name

    def _serve(self, name: str, span: Span) -> None:
        """A span for ``name``, out of a shard that is here: kept, or compared with what was fetched before."""
        known = self._digests.get((name, span))
        if known is None:
            self._keep(name, span, self._pieces(span))
        elif known != _digest(self._pieces(span)):
            raise SourceError(
                "the hub has sent other bytes for a range of it than for the whole",
                file=f"{self.repository}: {span.shard}",
                remedy="check what answers in the hub's place (a proxy?), then run the same command again",
            )

    def _keep(self, name: str, span: Span, pieces: Iterable[bytes]) -> None:
        path, digest, place = self._spans_path(name), hashlib.sha256(), span.place
        with named_errors(path):
            descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                for piece in pieces:
                    write_bytes(descriptor, piece, place)
                    digest.update(piece)
                    place += len(piece)
            finally:
                os.close(descriptor)
        self._digests[name, span] = digest.hexdigest()

    def _ranges(self, span: Span, stop: Event) -> Iterator[bytes]:
        for begin in range(span.begin, span.end, _PIECE_BYTES):
            end = min(begin + _PIECE_BYTES, span.end)
            content = read_range(self.repository, span.shard, begin, end, stop).content
            if len(content) != end - begin:
                raise SourceError(
                    "ends before its header says",
                    file=f"{self.repository}: {span.shard}",
                    remedy="run the same command again",
                )
            yield content

    def _pieces(self, span: Span) -> Iterator[bytes]:
        spec = TensorSpec(U8, (span.end - span.begin,))
        whole = StoredTensor(span.shard, spec, self.files / span.shard, span.begin)
        for first in range(0, spec.num_bytes, _PIECE_BYTES):
            yield read_bytes(whole, first, min(first + _PIECE_BYTES, spec.num_bytes)).tobytes()

    def _fetch_checked(self, name: str, file_bytes: int | None, stop: Event) -> FileRecord:
        """A file that has the length and the hash that the hub lists; what has not is fetched once more."""
        listed = self.repository.files[name]
        for _ in range(2):
            path = fetch_file(self.repository, name, self.files, stop)
            record = record_of(path, stop)
            is_length = record.file_bytes == (listed.num_bytes if file_bytes is None else file_bytes)
            if (is_length or listed.num_bytes is None) and listed.sha256 in (None, record.sha256):
                return record
            forget_file(self.files, name)
        raise SourceError(
            f"has {record.file_bytes} bytes with sha256 {record.sha256[:16]}..., and the hub lists "
            f"{listed.num_bytes} with {(listed.sha256 or 'none')[:16]}",
            file=f"{self.repository}: {name}",
            remedy="it was fetched twice: check the disk, and what answers in the hub's place",
        )


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
