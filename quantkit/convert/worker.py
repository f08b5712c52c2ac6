"""What a worker does with one task: read, decode, encode, lay out, check, write at the planned offset."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.reader import read_bytes
from quantkit.checkpoint.writer import ShardWriter
from quantkit.codecs.int4_group import Int4Group
from quantkit.errors import VerificationError
from quantkit.importance.moments import MomentReader
from quantkit.integrity.weighed_errors import SAMPLE_ROWS, WeighedSums
from quantkit.layouts import Layout
from quantkit.numerics.packing import Int4Words
from quantkit.numerics.search import importance_levels
from quantkit.plan.plan import Action, PlannedShard
from quantkit.plan.tasks import Task
from quantkit.transcode import (
    COMPOSED,
    ChooseKernels,
    Rows,
    check_copied,
    kernels_for,
    read_rows,
    read_words,
    recover_rows,
    weighed_rows,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """``error2_R`` and ``weight2_R``: squared error and squared weight of each quantized row."""

    task: Task
    encode_seconds: float = 0.0  # CPU time of this thread
    error2_R: NDArray[np.float64] | None = None
    weight2_R: NDArray[np.float64] | None = None
    weighed: WeighedSums | None = None


def run_task(
    task: Task, writer: ShardWriter, layout: Layout, choose_kernels: ChooseKernels, moments: MomentReader | None = None
) -> TaskReport:
    """One task, in any thread; ``moments``: what the search of scales is weighted by.

    Raises SourceError for bad values, ResourceError when disk or GPU refuse.
    """
    weight, outputs = task.job.weight, task.job.outputs
    if task.job.action == Action.COPY:
        raw = read_bytes(weight.parts[task.part], task.first, task.last)
        check_copied(weight, task.part, raw, task.first)
        writer.write(outputs[task.part].name, raw, first_byte=task.first)
        return TaskReport(task=task)
    if task.job.action == Action.RELAYOUT:
        assert task.job.scheme is not None
        words = read_words(weight, task.first, task.last, signed=task.job.scheme.signed)
        _write_rows(task, writer, layout.from_words(words))
        for part in task.job.carried if task.first == 0 else ():
            raw = read_bytes(weight.parts[part], 0, weight.parts[part].spec.num_bytes)
            check_copied(weight, part, raw, 0)
            writer.write(outputs[part].name, raw)
        return TaskReport(task=task)
    if task.job.action == Action.TO_FP8:
        _write_rows(task, writer, recover_rows(weight, task.first, task.last))
        return TaskReport(task=task)
    rows = read_rows(weight, task.first, task.last)
    kernels = choose_kernels(weight, task.job.scheme)
    if task.job.scheme is None:
        _write_rows(task, writer, {"values": kernels.to_bf16(rows)})
        return TaskReport(task=task)
    shape_C = None if moments is None else moments.shape(weight.name, weight.num_cols)
    if shape_C is not None:
        levels_C = importance_levels(shape_C, group_size=task.job.scheme.group_size)
        rows = replace(rows, importance_C=levels_C)
    made = kernels.quantize(rows, task.job.scheme)
    if task.first == 0 and not made.is_given:
        _check_first_row(rows, made.words, task.job.scheme)
    _write_rows(task, writer, layout.from_words(made.words))
    error2_R, weight2_R = made.sums
    return TaskReport(
        task=task,
        encode_seconds=made.encode_seconds,
        error2_R=error2_R,
        weight2_R=weight2_R,
        weighed=None if shape_C is None else weighed_sums(rows, made.words, task.job.scheme, shape_C),
    )


def write_constants(shard: PlannedShard, writer: ShardWriter, layout: Layout) -> None:
    """What follows from shapes alone. First of all, since it stands in front: the file fills from its beginning."""
    for job in shard.jobs:
        if job.scheme is not None:
            for part, array in job.constants(layout).items():
                writer.write(job.outputs[part].name, array)


def _write_rows(task: Task, writer: ShardWriter, stored: Mapping[str, NDArray[Any]]) -> None:
    for part, array in stored.items():
        output = task.job.outputs[part]
        writer.write(output.name, array, first_byte=task.first // output.rows_each * task.job.row_bytes(part))


def _check_first_row(rows: Rows, words: Int4Words, scheme: Int4Group) -> None:
    """The first row of every weight against the specification: a kernel gone wrong on this machine is found here."""
    expected = COMPOSED.encode(rows.first(1), scheme)
    for part, right, made in zip(Int4Words._fields, expected, words, strict=True):
        if right is not None and (made is None or not np.array_equal(right, made[:1])):
            raise VerificationError(
                f"the fast path and the specification differ in the first row ({part})",
                tensor=rows.weight.name,
                file=rows.weight.stored.path.name,
                remedy="this machine, numba or Triton computes wrong here; convert elsewhere and report it",
            )


def weighed_sums(rows: Rows, words: Int4Words, scheme: Int4Group, shape_C: NDArray[np.float64]) -> WeighedSums | None:
    """Of those among the first rows of the weight that are here, against the same without importance."""
    num_rows = SAMPLE_ROWS - rows.first_row
    if num_rows <= 0:
        return None
    sample = rows.first(num_rows)
    plain = kernels_for(rows.weight, scheme).encode(replace(sample, importance_C=None), scheme)
    error2_R, weight2_R = weighed_rows(sample, words.first(num_rows), scheme, shape_C)
    plain2_R, _ = weighed_rows(sample, plain, scheme, shape_C)
    return WeighedSums(error2_R, plain2_R, weight2_R)
