"""Cut jobs into tasks: row blocks small enough that memory stays bounded and every worker stays busy."""

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.codecs.opaque import NativeInt4
from quantkit.plan.plan import Action, Job, PlannedShard
from quantkit.transcode import has_row_blocks

TASK_BYTES = 16 << 20  # source bytes of one task; a worker holds about four times as much


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Rows ``[first, last)`` of a job; for a copy, bytes of the part named."""

    job: Job
    part: str
    first: int
    last: int

    @property
    def output_name(self) -> str:
        """The output tensor that it fills most of: a copy's own, else the first that has the weight's rows."""
        outputs = self.job.outputs
        if self.job.action == Action.COPY:
            return outputs[self.part].name
        return next(output.name for output in outputs.values() if output.rows_each == 1)

    @property
    def source_bytes(self) -> int:
        if self.job.action == Action.COPY:
            return self.last - self.first
        weight = self.job.weight
        return (self.last - self.first) * weight.stored.spec.num_bytes // max(1, weight.num_rows)


def task_bytes_of(job: Job) -> int:
    """Source bytes that the tasks of a job report as done."""
    if job.action == Action.COPY:
        return sum(job.weight.parts[part].spec.num_bytes for part in job.outputs)
    return job.weight.stored.spec.num_bytes


def shard_tasks(shard: PlannedShard, *, task_bytes: int = TASK_BYTES) -> Iterator[Task]:
    """Tasks of one shard in source order. Rows are never cut, so that sums over a row do not depend on the split."""
    for job in shard.jobs:
        if job.action == Action.COPY:
            for part in job.outputs:
                total = job.weight.parts[part].spec.num_bytes
                yield from _spans(job, part, total, task_bytes)
        else:
            yield from _spans(job, "rows", job.weight.num_rows, _rows_at_once(job, task_bytes))


def _rows_at_once(job: Job, task_bytes: int) -> int:
    """Rows that are stored as one stay together; all of them where a matrix lies turned round."""
    weight = job.weight
    if isinstance(weight.codec, NativeInt4) and not has_row_blocks(weight.codec):
        return max(1, weight.num_rows)
    row_bytes = max(1, weight.num_cols * weight.stored.spec.dtype.num_bytes)
    num_rows = max(1, task_bytes // row_bytes)
    return -(-num_rows // job.rows_at_least) * job.rows_at_least


def _spans(job: Job, part: str, total: int, step: int) -> Iterator[Task]:
    for first in range(0, total, step):
        yield Task(job=job, part=part, first=first, last=min(first + step, total))
    if total == 0:
        yield Task(job=job, part=part, first=0, last=0)
