"""What is converted and how, and the work itself: go on from what is finished, and make what is not."""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from quantkit.checkpoint.disk import free_bytes
from quantkit.checkpoint.hub import Repository
from quantkit.checkpoint.output import OutputDirectory
from quantkit.convert.execution import Execution
from quantkit.convert.journal import Entries, Journal, read_journals
from quantkit.convert.local import Share, execute
from quantkit.convert.resume import believed
from quantkit.convert.run import begin_run, run_document
from quantkit.convert.spool import Spool
from quantkit.errors import QuantkitError, ResourceError, UsageError, VerificationError
from quantkit.machine import bytes_text
from quantkit.plan.plan import Plan
from quantkit.plan.resources import disk_bytes
from quantkit.threads import ReportProgress
from quantkit.transcode import CPU
from quantkit.words import Words

SPOOL_GIB = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A plan, where its output goes, and how it is executed.

    ``device``: what computes, as ``choose_kernels`` reads it, in the process that does the work. ``provenance``: hub id
    and commit of the source, where there are any. ``words``: of the weights that become INT4, where
    calibration has chosen them. ``repository``: where the shards are, if not on the disk; they pass
    through a spool of ``spool_bytes``. ``resume``: without it finished work is thrown away.
    ``rank``: of ``world_size`` processes that share the work; None for one that does all of it.
    """

    plan: Plan
    target: Path
    num_jobs: int
    device: str = CPU
    provenance: Mapping[str, str] = field(default_factory=dict)
    words: Words | None = None
    repository: Repository | None = None
    spool_bytes: int = SPOOL_GIB << 30
    resume: bool = True
    rank: int | None = None
    world_size: int = 1
    report_progress: ReportProgress = lambda _, __: None
    started: float = field(default_factory=time.monotonic)

    def begin(self, output: OutputDirectory) -> None:
        """Say what this run is. Raises UsageError where the directory holds work of another."""
        if not self.resume:
            output.start_over()
        sha256 = None if self.words is None else self.words.sha256
        begin_run(
            output.work, run_document(self.plan, self.provenance, world_size=self.world_size, words_sha256=sha256)
        )

    def believed(self, output: OutputDirectory, entries: Entries) -> Entries:
        """Of what journals name, what is still so."""
        return believed(
            self.plan, output.directory, entries, num_jobs=self.num_jobs, report_progress=self.report_progress
        )

    def with_sidecars(self, output: OutputDirectory, only: Collection[str]) -> tuple[Plan, Spool | None]:
        """The plan with its checkpoint where it can be read, and the spool for the shards of ``only``.

        A rank completes no output, and does without the files beside the weights.
        """
        spool = self.spool_in(output.work / ("spool" if self.rank is None else f"spool-{self.rank}"))
        if spool is None:
            return self.plan, None
        spool.expect(self.plan, only)
        if self.rank is not None:
            return self.plan, spool
        return replace(self.plan, checkpoint=spool.with_small_files(self.plan.checkpoint)), spool

    def spool_in(self, directory: Path) -> Spool | None:
        """For shards that are still on the hub; None where they are on the disk."""
        if self.repository is None:
            return None
        return Spool(repository=self.repository, directory=directory, most_bytes=self.spool_bytes)


class Executor(Protocol):
    """Another way to make what is not done than threads of this process."""

    def __call__(
        self, conversion: Conversion, plan: Plan, output: OutputDirectory, journal: Journal, done: Entries
    ) -> Execution:
        """Every shard in its place, and in the journal."""


def work(
    conversion: Conversion, output: OutputDirectory, only: frozenset[str], executor: Executor | None = None
) -> tuple[Plan, Execution]:
    """Make the shards of ``only`` that are not made yet. The plan comes back as ``with_sidecars`` gives it."""
    journal = Journal(output.work, conversion.rank or 0)
    try:
        done = conversion.believed(output, journal.found)
        for name, entry in done.sources.items():
            if journal.found.sources[name].stamp != entry.stamp:
                journal.add_source(name, entry)
        output.clear(set(done.outputs), None if conversion.rank is None else only)
        output.keep = bool(done.outputs)
        check_resources(conversion, only, done)
        plan, spool = conversion.with_sidecars(output, only - done.outputs.keys() if executor is None else ())
        output.keep = output.keep or spool is not None
        if executor is not None:
            return plan, executor(conversion, plan, output, journal, done)
        share = Share(
            directory=output.directory, spool=spool, journal=journal, done=done, only=only, words=conversion.words
        )
        return plan, execute(
            plan,
            share,
            num_jobs=conversion.num_jobs,
            device=conversion.device,
            report_progress=conversion.report_progress,
        )
    finally:
        output.keep = output.keep or journal.has_output
        journal.close()


def check_resources(conversion: Conversion, only: frozenset[str], done: Entries, *, reclaimed_bytes: int = 0) -> None:
    """Raise ResourceError when what is not done does not fit on the disk.

    ``reclaimed_bytes``: of half-made shards, which lie on it and will go.
    """
    plan = conversion.plan
    pending = [shard.file_bytes for shard in plan.shards if shard.name in only and shard.name not in done.outputs]
    needed = disk_bytes(plan) - sum(shard.file_bytes for shard in plan.shards) + sum(pending)
    if conversion.repository is not None:
        awaited = only - done.outputs.keys()  # an output shard is called like its source
        sources = [source.file_bytes for source in plan.checkpoint.shards if source.name in awaited]
        needed += min(conversion.spool_bytes, sum(sources))
    free = free_bytes(conversion.target.parent) + reclaimed_bytes
    if needed > free:
        raise ResourceError(
            f"the output needs {bytes_text(needed)} and {bytes_text(free)} are free",
            file=conversion.target,
            remedy="free space, or choose another disk with -o",
        )


@contextmanager
def told_what_is_kept(conversion: Conversion, output: OutputDirectory) -> Iterator[None]:
    """What ends the work says how to go on, but for a refusal; work that verification found wrong is thrown away."""
    try:
        yield
    except VerificationError:
        output.keep = False
        raise
    except UsageError:  # the same command would be refused again
        raise
    except BaseException as error:
        num_done = 0
        with suppress(OSError, QuantkitError):  # which would hide what has happened
            num_done = len(read_journals(output.work).outputs) if output.keep else 0
        if num_done:
            error.add_note(
                f"{num_done} of {len(conversion.plan.shards)} shards are done and kept in {output.directory}: "
                "the same command goes on from there"
            )
        raise
