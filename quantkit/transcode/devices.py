"""What a conversion computes with: the processor, or GPUs that take turns. Same bytes.

A worker's thread keeps to one GPU, with a stream and pinned buffers of its own: while one thread copies, another
computes and a third writes.
"""

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.codecs.fp8_block import Fp8Block
from quantkit.codecs.int4_group import Int4Group
from quantkit.errors import ResourceError, UsageError
from quantkit.layouts.layout import Layout
from quantkit.transcode.kernels import Quantized, fp8_place, kernel_values, kernels_for
from quantkit.transcode.rows import Rows
from quantkit.weights.weight import Weight

if TYPE_CHECKING:
    from quantkit_kernels.staging import HostSource, Stage

CPU = "cpu"


class RowKernels(Protocol):
    """What a worker asks of rows."""

    @property
    def to_bf16(self) -> Callable[[Rows], NDArray[np.uint16]]:
        """BF16 bits, [R, C]."""

    @property
    def quantize(self) -> Callable[[Rows, Int4Group, Layout], Quantized]:
        """INT4 parts and the error of each row."""


ChooseKernels = Callable[[Weight, Layout], RowKernels]


def choose_kernels(device: str) -> ChooseKernels:
    """``cpu``, ``cuda``, ``cuda:N``, several of these with commas, or ``cuda:all``; for every weight its kernels.

    Raises UsageError for a device that is not here, or where torch and Triton are not installed.
    """
    if device == CPU:
        return kernels_for
    try:
        from quantkit_kernels.staging import Stage, find_devices
    except ImportError as error:
        raise UsageError(
            f"--device {device} needs torch and Triton", remedy="pip install 'quantkit[kernels]'"
        ) from error
    try:
        names = find_devices(device)
    except ValueError as error:
        raise UsageError(f"--device {device}: {error}", remedy="name GPUs of this machine, or leave it out") from error
    return Gpus(names, Stage).kernels_for


@dataclass(slots=True)
class Gpus:
    """The GPUs that are used, and the stage that each thread has on one of them."""

    names: tuple[str, ...]
    make_stage: "Callable[[str], Stage]"
    _num_threads: "itertools.count[int]" = field(default_factory=itertools.count)
    _own: threading.local = field(default_factory=threading.local)

    def kernels_for(self, weight: Weight, layout: Layout) -> RowKernels:
        """What has no kernel on a GPU is done by the processor."""
        if (weight.codec.name, layout.name) not in _ON_GPU:
            return kernels_for(weight, layout)
        return GpuKernels(stage=self._stage(), to_bf16=kernels_for(weight, layout).to_bf16)

    def _stage(self) -> "Stage":
        if not hasattr(self._own, "stage"):
            self._own.stage = self.make_stage(self.names[next(self._num_threads) % len(self.names)])
        stage: Stage = self._own.stage
        return stage


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKernels:
    """INT4 on a GPU; decoding to BF16 is bound by the disk and stays where it is."""

    stage: "Stage"
    to_bf16: Callable[[Rows], NDArray[np.uint16]]

    def quantize(self, rows: Rows, scheme: Int4Group, _: Layout) -> Quantized:
        """The arrays lie in the thread's buffers, until its next call. Raises ResourceError where memory ends."""
        started = time.thread_time()
        try:
            made = self.stage.quantize(
                _source(rows), group_size=scheme.group_size, scales=scheme.scales, signed=scheme.signed
            )
        except MemoryError as error:
            raise ResourceError(
                f"{self.stage.name} has no memory left", remedy="free it, or use another with --device"
            ) from error
        return Quantized(
            stored={"packed": made.packed, "scale": made.scale},
            sums=(made.error2, made.weight2),
            encode_seconds=time.thread_time() - started,
        )


_ON_GPU = {("fp8_block", "compressed-tensors"), ("float_values", "compressed-tensors")}


def _source(rows: Rows) -> "HostSource":
    if isinstance(rows.weight.codec, Fp8Block):
        place = fp8_place(rows)
        return rows.parts["codes"], rows.parts["scale"], place["block"], place["row_offset"]
    return kernel_values(rows), None, (1, 1), 0
