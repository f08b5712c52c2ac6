"""Execute a plan, or a rank's share of it, with threads on this machine."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from quantkit.checkpoint.disk import flush, free_bytes, named_errors
from quantkit.checkpoint.reader import Digest
from quantkit.checkpoint.source import Shard, stamp_of
from quantkit.checkpoint.writer import ShardWriter
from quantkit.convert.execution import Execution
from quantkit.convert.journal import Entries, OutputEntry, Recorder, SourceEntry
from quantkit.convert.resume import input_stamps
from quantkit.convert.spool import NUM_FETCHERS, Spool
from quantkit.convert.worker import TaskReport, run_task, write_constants
from quantkit.errors import ResourceError, SourceError
from quantkit.importance.moments import MomentReader
from quantkit.integrity.manifest import FileRecord, record_of
from quantkit.machine import bytes_text
from quantkit.plan.plan import Action, Plan, PlannedShard
from quantkit.plan.tasks import TASK_BYTES, Task, shard_tasks, task_bytes_of
from quantkit.threads import FollowUps, ReportProgress, Stage, Step, run_steps
from quantkit.transcode import CPU, ChooseKernels, choose_kernels, with_words
from quantkit.words import Words

_HASH_BYTES = 64 << 20  # of an output, in one step
_JOBS_PER_HASH = 4  # a hash keeps up with about twice so many workers
_FLUSH_BYTES = 256 << 20  # written to a shard between two waits for the disk: what a signal may have to wait for


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a process has to do: the source shards of ``only`` (all where it is None), but what is ``done``.

    Output shards go into ``directory``, and ``journal`` is told of each that is finished. Source shards come through
    ``spool`` where there is one. ``words``: of the weights that are INT4, from calibration.
    """

    directory: Path
    spool: Spool | None = None
    journal: Recorder | None = None
    done: Entries = field(default_factory=Entries)
    only: Collection[str] | None = None
    words: Words | None = None


def execute(
    plan: Plan,
    share: Share,
    *,
    num_jobs: int,
    device: str = CPU,
    task_bytes: int = TASK_BYTES,
    report_progress: ReportProgress = lambda _, __: None,
) -> Execution:
    """Write the planned shards of a share. The first error is raised, and what is not finished by then is left.

    ``device``: see ``choose_kernels``.
    """
    run = _Run(
        plan=plan,
        share=share,
        choose_kernels=with_words(choose_kernels(device), share.words),
        moments=None if plan.importance is None else plan.importance.reader(),
        task_bytes=task_bytes,
        report_progress=report_progress,
    )
    run.execution.restore(share.done)
    try:
        # the hash of a shard is one thread's work: it keeps up with a shard that has not many more to itself
        run.follow_ups.width = max(1, num_jobs // _JOBS_PER_HASH)
        run.feed()
        run_steps((), num_jobs=num_jobs, follow_ups=run.follow_ups, num_fetchers=NUM_FETCHERS)
    finally:
        run.abort()
    return run.execution


@dataclass(slots=True)
class _OpenShard:
    shard: PlannedShard
    writer: ShardWriter
    digest: Digest = field(default_factory=Digest)
    num_pending: int = 0
    unflushed_bytes: int = 0
    hashed_bytes: int = 0
    is_fed: bool = False
    is_finished: bool = False
    is_closed: bool = False
    is_hashing: bool = False


@dataclass(slots=True, kw_only=True)
class _Run:
    """Bookkeeping of one execution; everything but the steps themselves runs in the main thread."""

    plan: Plan
    share: Share
    choose_kernels: ChooseKernels
    moments: MomentReader | None
    task_bytes: int
    report_progress: ReportProgress
    execution: Execution = field(default_factory=Execution)
    follow_ups: FollowUps = field(default_factory=FollowUps)
    writers: list[ShardWriter] = field(default_factory=list)
    stage: Stage = field(init=False)
    awaited: deque[Shard] = field(default_factory=deque)  # to be fetched when there is room
    planned: dict[str, PlannedShard] = field(default_factory=dict)
    sources: dict[str, Shard] = field(default_factory=dict)

    def feed(self) -> None:
        """A feed for each shard, of the hash of its source and its tasks; or what is to be fetched first."""
        self.sources = {source.name: source for source in self.plan.checkpoint.shards}
        self.planned = planned = {shard.name: shard for shard in self.plan.shards}
        only, done = self.share.only, self.share.done
        sources = [source for source in self.plan.checkpoint.shards if only is None or source.name in only]
        wanted = [planned[source.name] for source in sources if source.name in planned]
        sizes = {shard.name: sum(map(task_bytes_of, shard.jobs)) for shard in wanted}
        earlier_bytes = sum(size for name, size in sizes.items() if name in done.outputs)
        self.stage = Stage(label="convert", total_bytes=sum(sizes.values()), earlier_bytes=earlier_bytes)
        self.execution.earlier_bytes = earlier_bytes
        self.report_progress(self.stage, 0)
        for source in sources:
            shard = planned.get(source.name)
            is_done = shard is None or shard.name in done.outputs
            if self.share.spool is not None:
                if not (is_done and source.name in done.sources):
                    self.awaited.append(source)
                continue
            hash_steps = () if source.name in done.sources else (self._hash_source_step(source),)
            shard_steps = () if shard is None or is_done else self._shard_steps(shard)
            self.follow_ups.feeds.append(chain(hash_steps, shard_steps))
        self._fetch_more()

    def abort(self) -> None:
        """Remove what is not finished: open, or closed and not hashed."""
        for writer in self.writers:
            writer.abort()
            if writer.path.name not in self.execution.output_records:
                writer.path.unlink(missing_ok=True)

    def _fetch_more(self) -> None:
        spool = self.share.spool
        while spool is not None and self.awaited and spool.has_room(self.awaited[0]):
            source = self.awaited.popleft()
            spool.book(source)
            self.follow_ups.fetch.append(self._fetch_step(spool, source))

    def _fetch_step(self, spool: Spool, source: Shard) -> Step:
        def step() -> Callable[[], None]:
            record = spool.fetch(source, self.follow_ups.stop)
            return lambda: self._fetched(spool, source, record)

        return step

    def _fetched(self, spool: Spool, source: Shard, record: FileRecord) -> None:
        self._book_source(source, record)
        shard = self.planned.get(source.name)
        if shard is None or shard.name in self.share.done.outputs:
            self._drop(source.name)
        else:
            self.follow_ups.feeds.append(self._shard_steps(spool.localized(shard)))

    def _drop(self, name: str) -> None:
        """A source shard is done with: there is room for another."""
        if self.share.spool is not None:
            self.share.spool.drop(name)
            self._fetch_more()

    def _shard_steps(self, shard: PlannedShard) -> Iterator[Step]:
        self._check_room(shard)
        opened = _OpenShard(shard, ShardWriter(self.share.directory / shard.name, shard.specs))
        self.writers.append(opened.writer)
        write_constants(shard, opened.writer, self.plan.layout)
        tasks = shard_tasks(shard, task_bytes=self.task_bytes)
        for task in sorted(tasks, key=lambda task: (opened.writer.begin_of(task.output_name), task.first)):
            opened.num_pending += 1
            yield self._task_step(task, opened)
        opened.is_fed = True
        self._finish_if_complete(opened)

    def _check_room(self, shard: PlannedShard) -> None:
        """Others may write to the same disk: better here than in the middle of a shard."""
        free = free_bytes(self.share.directory)
        if free < shard.file_bytes:
            raise ResourceError(
                f"the shard needs {bytes_text(shard.file_bytes)} and {bytes_text(free)} are free",
                file=self.share.directory / shard.name,
                remedy="free space, then run the same command again",
            )

    def _task_step(self, task: Task, opened: _OpenShard) -> Step:
        def step() -> Callable[[], None]:
            report = run_task(task, opened.writer, self.plan.layout, self.choose_kernels, self.moments)
            return lambda: self._book(report, opened)

        return step

    def _book(self, report: TaskReport, opened: _OpenShard) -> None:
        task = report.task
        opened.num_pending -= 1
        opened.unflushed_bytes += task.source_bytes
        self.report_progress(self.stage, task.source_bytes)
        if task.job.action == Action.INT4:
            self.execution.book(report)
        if opened.unflushed_bytes >= _FLUSH_BYTES:
            opened.unflushed_bytes = 0
            self.follow_ups.flush.append(self._flush_step(opened))
        self._hash_on(opened)
        self._finish_if_complete(opened)

    def _finish_if_complete(self, opened: _OpenShard) -> None:
        if opened.is_fed and opened.num_pending == 0 and not opened.is_finished:
            opened.is_finished = True
            self._drop(opened.shard.name)
            self.follow_ups.flush.append(self._close_step(opened))

    def _flush_step(self, opened: _OpenShard) -> Step:
        def step() -> Callable[[], None]:
            opened.writer.flush()
            return lambda: None

        return step

    def _close_step(self, opened: _OpenShard) -> Step:
        def step() -> Callable[[], None]:
            opened.writer.close()
            with named_errors(self.share.directory):
                flush(self.share.directory)

            def book() -> None:
                opened.is_closed = True
                self._hash_on(opened)

            return book

        return step

    def _hash_on(self, opened: _OpenShard) -> None:
        """Hash what is written without a gap, soon after it is: nothing is left to be read again at the end."""
        if opened.is_hashing:
            return
        first, last = opened.hashed_bytes, opened.writer.prefix_bytes
        if opened.is_closed and first == last:
            self._book_output(opened, FileRecord(file_bytes=last, sha256=opened.digest.hexadecimal))
        elif opened.is_closed or last - first >= _HASH_BYTES:
            opened.is_hashing = True
            self.follow_ups.work.append(self._hash_output_step(opened, first, last))

    def _hash_output_step(self, opened: _OpenShard, first: int, last: int) -> Step:
        def step() -> Callable[[], None]:
            opened.digest.take(opened.writer.path, first, last, stop=self.follow_ups.stop)

            def book() -> None:
                opened.hashed_bytes, opened.is_hashing = last, False
                self._hash_on(opened)

            return book

        return step

    def _check_unchanged(self, names: Iterable[str]) -> None:
        """What was read while it was written is a mixture of two. What came through the spool was hashed as it is."""
        for name in names:
            source = self.sources[name]
            if self.share.spool is None and stamp_of(source.path) != source.stamp:
                raise SourceError(
                    "has changed while it was converted",
                    file=name,
                    remedy="leave the source alone, then give --no-resume to start over",
                )

    def _book_output(self, opened: _OpenShard, record: FileRecord) -> None:
        shard = opened.shard
        inputs = input_stamps(self.plan, self.planned[shard.name])
        self._check_unchanged(inputs)
        if self.moments is not None:
            self.moments.check_unchanged()
        self.execution.output_records[shard.name] = record
        names = [job.weight.name for job in shard.jobs if job.action == Action.INT4]
        weighed = self.execution.weighed.finish(names)
        if self.share.journal is not None:
            errors = tuple(map(self.execution.rows.error, names))
            entry = OutputEntry(record=record, inputs=inputs, errors=errors, weighed=weighed)
            self.share.journal.add_output(shard.name, entry)

    def _hash_source_step(self, source: Shard) -> Step:
        def step() -> Callable[[], None]:
            record = record_of(source.path, self.follow_ups.stop)
            return lambda: self._book_source(source, record)

        return step

    def _book_source(self, source: Shard, record: FileRecord) -> None:
        self._check_unchanged((source.name,))
        self.execution.source_records[source.name] = record
        if self.share.journal is not None and source.name not in self.share.done.sources:
            self.share.journal.add_source(source.name, SourceEntry(record=record, stamp=source.stamp))
