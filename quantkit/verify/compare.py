"""An output against its source: pass-through bit for bit, dequantized weights bit for bit, INT4 by its error."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.reader import read_bytes
from quantkit.checkpoint.source import Checkpoint
from quantkit.engines.mixed import BLOCK
from quantkit.errors import SourceError, VerificationError
from quantkit.integrity.weight_errors import RowCollector, WeightError
from quantkit.layouts.layout import Stored
from quantkit.numerics import bfloat16, fp8
from quantkit.plan.plan import Action, Job, Plan
from quantkit.plan.tasks import TASK_BYTES, Task, shard_tasks, task_bytes_of
from quantkit.threads import ReportProgress, Stage, Step, run_steps
from quantkit.transcode import kernels_for, read_rows, read_words
from quantkit.verify.report import Finding

_CHECK = "values against the source"
_NOT_THE_SOURCES = "is not what the source holds"


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Errors of quantized weights, and what did not come out as planned."""

    rows: RowCollector = field(default_factory=RowCollector)
    findings: list[Finding] = field(default_factory=list)

    @property
    def errors(self) -> list[WeightError]:
        return self.rows.errors

    def collect(self, task: Task, error2_R: NDArray[np.float64], weight2_R: NDArray[np.float64]) -> None:
        """Rows of a quantized weight."""
        weight = task.job.weight
        self.rows.add(weight.name, task.job.role, weight.num_rows, error2_R, weight2_R)


def compare_with_source(
    plan: Plan,
    output: Checkpoint,
    *,
    is_fast: bool,
    num_jobs: int,
    report_progress: ReportProgress = lambda _, __: None,
) -> Comparison:
    """Compare every tensor; ``is_fast`` leaves out whatever needs dequantizing."""
    comparison = Comparison()

    def is_included(job: Job) -> bool:
        return job.action == Action.COPY or not is_fast

    total_bytes = sum(task_bytes_of(job) for job in plan.jobs if is_included(job))
    stage = Stage(label="compare with the source", total_bytes=total_bytes)
    report_progress(stage, 0)

    def steps() -> Iterator[Step]:
        for shard in plan.shards:
            for task in shard_tasks(shard, task_bytes=TASK_BYTES):
                if is_included(task.job):
                    yield _step(task)

    def _step(task: Task) -> Step:
        def step() -> Callable[[], None]:
            book = _compare(task, plan, output, comparison)

            def done() -> None:
                report_progress(stage, task.source_bytes)
                book()

            return done

        return step

    run_steps(steps(), num_jobs=num_jobs)
    comparison.findings.sort(key=lambda finding: (finding.tensor or "", finding.message))
    return comparison


def _compare(task: Task, plan: Plan, output: Checkpoint, comparison: Comparison) -> Callable[[], None]:
    job = task.job
    if job.action == Action.COPY:
        name = job.outputs[task.part].name
        source = read_bytes(job.weight.parts[task.part], task.first, task.last)
        is_same = np.array_equal(source, _read_output(output.tensors[name], task.first, task.last))
        return _finding(comparison, name, "differs from the source, which it must copy bit for bit", is_same)
    stored = {part: _rows_of(output, part, task) for part, one in job.outputs.items() if one.rows_each}
    if job.action == Action.RELAYOUT:
        return _compare_words(task, plan, output, stored, comparison)
    rows = read_rows(job.weight, task.first, task.last)
    if job.action == Action.TO_FP8:
        decoded = bfloat16.from_float32(fp8.dequantize(stored["codes"], stored["scale"], block=BLOCK))
        is_same = np.array_equal(decoded, rows.parts["values"])
        return _finding(comparison, job.outputs["codes"].name, "does not decode to the BF16 of the source", is_same)
    kernels = kernels_for(job.weight, job.scheme)
    if job.scheme is None:
        is_same = np.array_equal(kernels.to_bf16(rows).reshape(-1), stored["values"].reshape(-1))
        name = job.outputs["values"].name
        return _finding(comparison, name, "is not the source decoded and rounded to BF16", is_same)
    bookings = _compare_constants(task, plan, output, comparison)
    error2_R, weight2_R = kernels.row_sums(rows, plan.layout.to_words(stored), job.scheme)

    def book() -> None:
        for one in bookings:
            one()
        comparison.collect(task, error2_R, weight2_R)

    return book


def _compare_constants(task: Task, plan: Plan, output: Checkpoint, comparison: Comparison) -> list[Callable[[], None]]:
    """With the first rows of a weight."""
    job, bookings = task.job, []
    for part, expected in job.constants(plan.layout).items() if task.first == 0 else ():
        name = job.outputs[part].name
        stored_bytes = _read_output(output.tensors[name], 0, expected.nbytes)
        got = stored_bytes.view(expected.dtype).reshape(expected.shape)
        bookings.append(_finding(comparison, name, f"holds {got.tolist()}", np.array_equal(got, expected)))
    return bookings


def _compare_words(
    task: Task, plan: Plan, output: Checkpoint, stored: Stored, comparison: Comparison
) -> Callable[[], None]:
    """Codes, scales and zero points of INT4 that was laid out anew: the same."""
    job = task.job
    assert job.scheme is not None
    source = read_words(job.weight, task.first, task.last, signed=job.scheme.signed)
    bookings = _compare_constants(task, plan, output, comparison)
    for part, right, made in zip(source._fields, source, plan.layout.to_words(stored), strict=True):
        if right is not None:
            is_same = made is not None and np.array_equal(right, made)
            bookings.append(_finding(comparison, job.outputs[part].name, _NOT_THE_SOURCES, is_same))
    for part in job.carried if task.first == 0 else ():
        name, size = job.outputs[part].name, job.outputs[part].spec.num_bytes
        is_same = np.array_equal(
            read_bytes(job.weight.parts[part], 0, size), _read_output(output.tensors[name], 0, size)
        )
        bookings.append(_finding(comparison, name, _NOT_THE_SOURCES, is_same))

    def book() -> None:
        for one in bookings:
            one()

    return book


def _finding(comparison: Comparison, tensor: str, message: str, is_good: bool) -> Callable[[], None]:
    def book() -> None:
        if not is_good:
            comparison.findings.append(Finding(check=_CHECK, message=message, tensor=tensor))

    return book


def _read_output(tensor: StoredTensor, first: int, last: int) -> NDArray[np.uint8]:
    """Bytes of the output: what is wrong here is damage, not a bad source."""
    try:
        return read_bytes(tensor, first, last)
    except SourceError as error:
        raise VerificationError(
            error.message, tensor=error.tensor, file=error.file, remedy="check the disk, or convert again"
        ) from error


def _rows_of(output: Checkpoint, part: str, task: Task) -> NDArray[Any]:
    """As a matrix, whatever the rank."""
    one, row_bytes = task.job.outputs[part], task.job.row_bytes(part)
    first, last = task.first // one.rows_each, -(-task.last // one.rows_each)
    raw = _read_output(output.tensors[one.name], first * row_bytes, last * row_bytes)
    num_cols = one.spec.shape[1] if len(one.spec.shape) == 2 else task.job.weight.num_cols
    return raw.view(one.spec.dtype.numpy).reshape(last - first, num_cols)
