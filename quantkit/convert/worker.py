"""What a worker does with one task: read, decode, encode, pack, check, write at the planned offset."""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.reader import read_bytes
from quantkit.checkpoint.writer import ShardWriter
from quantkit.codecs.int4_group import Int4Group
from quantkit.layouts import compressed_tensors as ct
from quantkit.plan.model import Action
from quantkit.plan.tasks import Task
from quantkit.transcode import check_copied, kernels_for, read_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """``error2_R`` and ``weight2_R``: squared error and squared weight of each quantized row."""

    task: Task
    encode_seconds: float = 0.0  # CPU time of this thread
    error2_R: NDArray[np.float64] | None = None
    weight2_R: NDArray[np.float64] | None = None


def run_task(task: Task, writer: ShardWriter, target: Int4Group) -> TaskReport:
    """One task, in any thread. Raises SourceError for bad values, ResourceError when the disk refuses."""
    job = task.job
    if job.action == Action.COPY:
        name, _ = job.outputs[task.part]
        raw = read_bytes(job.weight.parts[task.part], task.first, task.last)
        check_copied(job.weight, task.part, raw, task.first)
        writer.write(name, raw, first_byte=task.first)
        return TaskReport(task=task)
    rows = read_rows(job.weight, task.first, task.last)
    kernels = kernels_for(job.weight)
    if job.action == Action.TO_BF16:
        name, _ = job.outputs["values"]
        writer.write(name, kernels.to_bf16(rows), first_byte=task.first * job.weight.num_cols * 2)
        return TaskReport(task=task)
    started = time.thread_time()
    packed_RW, scale_RG = kernels.quantize(rows, target)
    encode_seconds = time.thread_time() - started
    # measured on the packed words that are written, by other code than the encoder's
    error2_R, weight2_R = kernels.row_sums(rows, (packed_RW, scale_RG), target)
    for part, array in ((ct.PACKED, packed_RW), (ct.SCALE, scale_RG)):
        name, spec = job.outputs[part]
        row_bytes = spec.num_bytes // max(1, job.weight.num_rows)
        writer.write(name, array, first_byte=task.first * row_bytes)
    if task.first == 0:
        writer.write(job.outputs[ct.SHAPE][0], ct.shape_tensor(job.weight.num_rows, job.weight.num_cols))
    return TaskReport(task=task, encode_seconds=encode_seconds, error2_R=error2_R, weight2_R=weight2_R)
