"""An output against its source: pass-through bit for bit, dequantized weights bit for bit, INT4 by its error."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.reader import read_bytes, read_tensor
from quantkit.checkpoint.source import Checkpoint
from quantkit.integrity.weight_errors import WeightError, weight_error
from quantkit.layouts import compressed_tensors as ct
from quantkit.plan.model import Action, Job, Plan
from quantkit.plan.tasks import TASK_BYTES, Task, shard_tasks, task_bytes_of
from quantkit.threads import ReportProgress, Step, run_steps
from quantkit.transcode import Packed, kernels_for, read_rows
from quantkit.verify.report import Finding

_CHECK = "values against the source"


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Errors of quantized weights, and what did not come out as planned."""

    errors: list[WeightError] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    _rows: dict[str, list[tuple[int, NDArray[np.float64], NDArray[np.float64]]]] = field(default_factory=dict)


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

    def steps() -> Iterator[Step]:
        for shard in plan.shards:
            for task in shard_tasks(shard, task_bytes=TASK_BYTES):
                if is_included(task.job):
                    yield _step(task)

    def _step(task: Task) -> Step:
        def step() -> Callable[[], None]:
            book = _compare(task, plan, output, comparison)

            def done() -> None:
                report_progress(task.source_bytes, total_bytes)
                book()

            return done

        return step

    run_steps(steps(), num_jobs=num_jobs)
    comparison.errors.sort(key=lambda error: error.name)
    comparison.findings.sort(key=lambda finding: (finding.tensor or "", finding.message))
    return comparison


def _compare(task: Task, plan: Plan, output: Checkpoint, comparison: Comparison) -> Callable[[], None]:
    job = task.job
    if job.action == Action.COPY:
        name, _ = job.outputs[task.part]
        source = read_bytes(job.weight.parts[task.part], task.first, task.last)
        is_same = np.array_equal(source, read_bytes(output.tensors[name], task.first, task.last))
        return _finding(comparison, name, "differs from the source, which it must copy bit for bit", is_same)
    rows = read_rows(job.weight, task.first, task.last)
    kernels = kernels_for(job.weight)
    if job.action == Action.TO_BF16:
        name, _ = job.outputs["values"]
        expected = kernels.to_bf16(rows)
        stored = _rows_of(output.tensors[name], job, task)
        is_same = np.array_equal(expected.reshape(-1), stored.reshape(-1))
        return _finding(comparison, name, "is not the source decoded and rounded to BF16", is_same)
    packed: Packed = (
        _rows_of(output.tensors[job.outputs[ct.PACKED][0]], job, task),
        _rows_of(output.tensors[job.outputs[ct.SCALE][0]], job, task),
    )
    shape = read_tensor(output.tensors[job.outputs[ct.SHAPE][0]])
    error2_R, weight2_R = kernels.row_sums(rows, packed, plan.target)
    is_shape_right = shape.tolist() == [job.weight.num_rows, job.weight.num_cols]
    report_shape = _finding(comparison, job.outputs[ct.SHAPE][0], f"holds {shape.tolist()}", is_shape_right)

    def book() -> None:
        report_shape()
        blocks = comparison._rows.setdefault(job.weight.name, [])
        blocks.append((task.last - task.first, error2_R, weight2_R))
        if sum(block[0] for block in blocks) == job.weight.num_rows:
            comparison.errors.append(
                weight_error(job.weight.name, job.role, [one[1] for one in blocks], [one[2] for one in blocks])
            )
            del comparison._rows[job.weight.name]

    return book


def _finding(comparison: Comparison, tensor: str, message: str, is_good: bool) -> Callable[[], None]:
    def book() -> None:
        if not is_good:
            comparison.findings.append(Finding(check=_CHECK, message=message, tensor=tensor))

    return book


def _rows_of(tensor: StoredTensor, job: Job, task: Task) -> NDArray[Any]:
    row_bytes = tensor.spec.num_bytes // max(1, job.weight.num_rows)
    raw = read_bytes(tensor, task.first * row_bytes, task.last * row_bytes)
    return raw.view(tensor.spec.dtype.numpy).reshape(task.last - task.first, -1)
