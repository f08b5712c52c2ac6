"""In the place of a conversion's work on a simulated clock: the same steps, which only say what they cost."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulated_clock import Clock

from quantkit.checkpoint.hub import HubFile, Repository
from quantkit.convert.spool import Spool
from quantkit.convert.worker import TaskReport
from quantkit.integrity.manifest import FileRecord
from quantkit.plan.plan import Action, Plan
from quantkit.plan.tasks import Task, task_bytes_of

CORE_BYTES = 190e6  # source bytes of FP8 that a core turns into INT4 in a second, hashing and copying included
HASH_BYTES = 1.5e9  # a core
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Machines:
    """``nodes`` of ``cores`` each; bytes a second of a node's disks and network (0: the source is on the disk)."""

    title: str
    nodes: int
    cores: int
    disk: float
    network: float
    spool_gib: float = 40


class MeasuredSpool(Spool):
    """Remembers how much was booked at most."""

    most_booked: int

    def book(self, source: Any) -> None:
        super().book(source)
        self.most_booked = max(self.most_booked, sum(self._booked.values()))

    def drop(self, name: str) -> None:
        self._booked.pop(name, None)

    def localized(self, shard: Any) -> Any:
        return shard


def spool_of(plan: Plan, machines: Machines, clock: Clock) -> MeasuredSpool:
    """The real bookkeeping; a download costs the network, and the hash of what came a core."""
    files = {shard.name: HubFile(num_bytes=shard.file_bytes, sha256=None) for shard in plan.checkpoint.shards}
    repository = Repository(hub_id="a/b", revision="main", commit="0" * 40, files=files)
    spool = MeasuredSpool(repository=repository, directory=Path("/nowhere"), most_bytes=int(machines.spool_gib * GIB))
    spool.most_booked = 0

    def fetch(source: Any, stop: Any) -> FileRecord:
        clock.spend("network", source.file_bytes / machines.network)
        clock.spend("core", source.file_bytes / HASH_BYTES)
        return FileRecord(file_bytes=source.file_bytes, sha256="")

    spool.fetch = fetch  # type: ignore[method-assign]
    return spool


def costs(plan: Plan, machines: Machines, clock: Clock) -> list[tuple[str, Any]]:
    """What stands in the place of the work: the same steps, which only say what they cost."""

    def run_task(task: Any, writer: Any, *_: Any) -> TaskReport:
        if not machines.network:
            clock.wait(min(hashed_by(task), clock.at + task.source_bytes / machines.disk))
        factor = 1.0 if task.job.action == Action.INT4 else 0.25
        clock.spend("core", factor * task.source_bytes / CORE_BYTES)
        writer.written += task.source_bytes
        return TaskReport(task=task, error2_R=(), weight2_R=())  # type: ignore[arg-type]

    def record_of(path: Path, stop: Any = None) -> FileRecord:
        began, num_bytes = clock.at, source_bytes[path.name]
        clock.spend_together({"read": num_bytes / machines.disk, "core": num_bytes / HASH_BYTES})
        hashes[path] = (began, (clock.at - began) / num_bytes)
        return FileRecord(file_bytes=source_bytes[path.name], sha256="")

    def hashed_by(task: Task) -> float:
        """When the hash of the source, which reads a shard once and from its beginning on, has passed the task."""
        stored = task.job.weight.stored
        began, seconds_a_byte = hashes[stored.path]
        whole = stored.spec.num_bytes if task.job.action == Action.COPY else task.job.weight.num_rows
        return began + (stored.begin + task.last / max(1, whole) * stored.spec.num_bytes) * seconds_a_byte

    def take(digest: Any, path: Path, first: int, last: int, *, stop: Any = None) -> None:
        clock.spend("core", (last - first) / HASH_BYTES)

    class Writer:
        """Fills from its beginning, as fast as its tasks read; a flush costs the disk what was written since."""

        def __init__(self, path: Path, specs: Any) -> None:
            self.path, self.size = path, sum(spec.num_bytes for spec in specs.values())
            self.written = self.flushed = 0.0

        def begin_of(self, name: str) -> int:
            return 0

        @property
        def prefix_bytes(self) -> int:
            return int(self.size * min(self.written / max(task_bytes[self.path.name], 1), 1.0))

        def flush(self) -> None:
            clock.spend("write", (self.prefix_bytes - self.flushed) / machines.disk)
            self.flushed = self.prefix_bytes

        def close(self) -> None:
            self.flush()

        def abort(self) -> None:
            pass

    hashes: dict[Path, tuple[float, float]] = {}
    stamps = {shard.path: shard.stamp for shard in plan.checkpoint.shards}
    source_bytes = {shard.name: shard.file_bytes for shard in plan.checkpoint.shards}
    task_bytes = {shard.name: sum(map(task_bytes_of, shard.jobs)) for shard in plan.shards}
    local = "quantkit.convert.local"
    return [
        (f"{local}.run_task", run_task),
        (f"{local}.record_of", record_of),
        (f"{local}.Digest.take", take),
        (f"{local}.write_constants", lambda *_: None),
        (f"{local}.ShardWriter", Writer),
        (f"{local}.named_errors", lambda path: nullcontext()),
        (f"{local}.stamp_of", stamps.__getitem__),
        (f"{local}.flush", lambda path: None),
        (f"{local}.free_bytes", lambda path: 1 << 60),
    ]
