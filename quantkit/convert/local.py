"""Execute a plan with threads on this machine."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.checkpoint.reader import hash_file
from quantkit.checkpoint.writer import ShardWriter
from quantkit.convert.worker import TaskReport, run_task
from quantkit.integrity.manifest import FileRecord
from quantkit.integrity.weight_errors import RowCollector, WeightError
from quantkit.plan.plan import Action, Plan, PlannedShard
from quantkit.plan.tasks import TASK_BYTES, Task, shard_tasks, task_bytes_of
from quantkit.threads import FollowUps, ReportProgress, Step, run_steps


@dataclass(slots=True, kw_only=True)
class Execution:
    """What was done: hashes of sources and outputs by shard, errors by weight, the encoder's own CPU time."""

    source_records: dict[str, FileRecord] = field(default_factory=dict)
    output_records: dict[str, FileRecord] = field(default_factory=dict)
    rows: RowCollector = field(default_factory=RowCollector)
    encoded_bytes: int = 0
    encode_seconds: float = 0.0

    @property
    def errors(self) -> list[WeightError]:
        """Of every quantized weight, by name."""
        return self.rows.errors


def execute(
    plan: Plan,
    directory: Path,
    *,
    num_jobs: int,
    task_bytes: int = TASK_BYTES,
    report_progress: ReportProgress = lambda _, __: None,
) -> Execution:
    """Write every planned shard into ``directory``. The first error stops everything and is raised."""
    total_bytes = sum(map(task_bytes_of, plan.jobs))
    run = _Run(
        plan=plan, directory=directory, task_bytes=task_bytes, report_progress=report_progress, total_bytes=total_bytes
    )
    try:
        run_steps(run.steps(), num_jobs=num_jobs, follow_ups=run.follow_ups)
    finally:
        run.abort()
    return run.execution


@dataclass(slots=True)
class _OpenShard:
    shard: PlannedShard
    writer: ShardWriter
    num_pending: int = 0
    is_fed: bool = False
    is_finished: bool = False


@dataclass(slots=True, kw_only=True)
class _Run:
    """Bookkeeping of one execution; everything but the steps themselves runs in the main thread."""

    plan: Plan
    directory: Path
    task_bytes: int
    report_progress: ReportProgress
    total_bytes: int
    execution: Execution = field(default_factory=Execution)
    follow_ups: FollowUps = field(default_factory=FollowUps)
    writers: list[ShardWriter] = field(default_factory=list)

    def steps(self) -> Iterator[Step]:
        """Every task of every shard, and the hash of every source shard."""
        planned = {shard.name: shard for shard in self.plan.shards}
        for source in self.plan.checkpoint.shards:
            if source.name in planned:
                yield from self._shard_steps(planned[source.name])
            yield self._hash_step(source.path, source.name, self.execution.source_records)

    def abort(self) -> None:
        """Close what is still open; nothing happens to a finished shard."""
        for writer in self.writers:
            writer.abort()

    def _shard_steps(self, shard: PlannedShard) -> Iterator[Step]:
        opened = _OpenShard(shard, ShardWriter(self.directory / shard.name, shard.specs))
        self.writers.append(opened.writer)
        for task in shard_tasks(shard, task_bytes=self.task_bytes):
            opened.num_pending += 1
            yield self._task_step(task, opened)
        opened.is_fed = True
        self._finish_if_complete(opened)

    def _task_step(self, task: Task, opened: _OpenShard) -> Step:
        def step() -> Callable[[], None]:
            report = run_task(task, opened.writer, self.plan.layout)
            return lambda: self._book(report, opened)

        return step

    def _book(self, report: TaskReport, opened: _OpenShard) -> None:
        task, execution = report.task, self.execution
        opened.num_pending -= 1
        self.report_progress(task.source_bytes, self.total_bytes)
        if task.job.action == Action.INT4:
            execution.encoded_bytes += task.source_bytes
            execution.encode_seconds += report.encode_seconds
            weight, rows = task.job.weight, (report.error2_R, report.weight2_R)
            assert rows[0] is not None
            assert rows[1] is not None
            execution.rows.add(weight.name, task.job.role, weight.num_rows, rows[0], rows[1])
        self._finish_if_complete(opened)

    def _finish_if_complete(self, opened: _OpenShard) -> None:
        if opened.is_fed and opened.num_pending == 0 and not opened.is_finished:
            opened.is_finished = True
            self.follow_ups.flush.append(self._close_step(opened))

    def _close_step(self, opened: _OpenShard) -> Step:
        def step() -> Callable[[], None]:
            opened.writer.close()
            hash_it = self._hash_step(opened.writer.path, opened.shard.name, self.execution.output_records)
            return lambda: self.follow_ups.work.append(hash_it)

        return step

    def _hash_step(self, path: Path, name: str, records: dict[str, FileRecord]) -> Step:
        def step() -> Callable[[], None]:
            record = FileRecord(file_bytes=path.stat().st_size, sha256=hash_file(path))
            return lambda: records.__setitem__(name, record)

        return step
