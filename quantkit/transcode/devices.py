"""What a conversion computes with: the CPU, or GPUs that take turns. Same bytes.

A worker's thread keeps to one GPU, with a stream and pinned buffers of its own: while one thread copies, another
computes and a third writes.
"""

import itertools
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.codecs.int4_group import Int4Group
from quantkit.errors import ResourceError, UsageError, not_installed
from quantkit.numerics.packing import Int4Words
from quantkit.transcode.kernels import INT4_GROUP, Quantized, fp8_place, kernel_values, kernels_for
from quantkit.transcode.rows import Rows
from quantkit.weights.weight import Weight

if TYPE_CHECKING:
    from quantkit_kernels.staging import HostSource, Lane

CPU, ALL_GPUS = "cpu", "cuda:all"


class RowKernels(Protocol):
    """What a worker asks of rows."""

    @property
    def to_bf16(self) -> Callable[[Rows], NDArray[np.uint16]]:
        """BF16 bits, [R, C]."""

    @property
    def quantize(self) -> Callable[[Rows, Int4Group], Quantized]:
        """INT4 words and the error of each row."""


ChooseKernels = Callable[[Weight, Int4Group | None], RowKernels]


def device_names(device: str) -> tuple[str, ...]:
    """The GPUs that a text names, none for ``cpu``; of ``cuda:all`` only that word. Raises UsageError for no device."""
    if device == CPU:
        return ()
    if device == ALL_GPUS:
        return (ALL_GPUS,)
    names = tuple("cuda:0" if name == "cuda" else name for name in device.split(","))
    for name in names:
        if re.fullmatch("cuda:[0-9]{1,4}", name) is None:
            raise UsageError(f"--device {device}: {name!r} is no GPU", remedy="write cuda, cuda:0,cuda:1 or cuda:all")
    if len(set(names)) < len(names):
        raise UsageError(f"--device {device}: a GPU is named twice", remedy="name each once")
    return names


def first_device(device: str) -> str:
    """The one that runs a model: ``cpu`` or ``cuda:N``. Raises UsageError for no device."""
    names = device_names(device)
    return "cuda:0" if names == (ALL_GPUS,) else next(iter(names), CPU)


def choose_kernels(device: str) -> ChooseKernels:
    """``cpu``, ``cuda``, ``cuda:N``, several of these with commas, or ``cuda:all``; for every weight its kernels.

    Raises UsageError for a device that is not here, or where torch and Triton are not installed.
    """
    names = device_names(device)
    if not names:
        return kernels_for
    try:
        from quantkit_kernels.staging import Lane, count_gpus
    except ImportError as error:
        raise not_installed(f"--device {device}", "torch and Triton", extra="kernels") from error
    here = tuple(f"cuda:{index}" for index in range(count_gpus()))
    names = here if names == (ALL_GPUS,) else names
    missing = [name for name in names if name not in here]
    if missing or not names:
        raise UsageError(
            f"--device {device}: torch sees {len(here) or 'no'} GPUs, {', '.join(missing) or 'so none'} is not here",
            remedy="name GPUs of this machine, or leave --device out",
        )
    return Gpus(names, Lane).kernels_for


@dataclass(slots=True)
class Gpus:
    """The GPUs that are used, and the lane that each thread has to one of them."""

    names: tuple[str, ...]
    make_lane: "Callable[[str], Lane]"
    _thread: "itertools.count[int]" = field(default_factory=itertools.count)
    _own: threading.local = field(default_factory=threading.local)

    def kernels_for(self, weight: Weight, scheme: Int4Group | None) -> RowKernels:
        """What has no kernel on a GPU is done by the CPU."""
        on_cpu = kernels_for(weight, scheme)
        source_of = None if scheme is None else ON_GPU.get((weight.codec.name, scheme.name))
        if source_of is None:
            return on_cpu
        return GpuKernels(lane=self.lane(), source_of=source_of, to_bf16=on_cpu.to_bf16)

    def lane(self) -> "Lane":
        """That of the calling thread; threads take the GPUs in turns, as they come."""
        if not hasattr(self._own, "lane"):
            self._own.lane = self.make_lane(self.names[next(self._thread) % len(self.names)])
        lane: Lane = self._own.lane
        return lane


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKernels:
    """INT4 on a GPU; decoding to BF16 is bound by the disk and stays where it is."""

    lane: "Lane"
    source_of: "Callable[[Rows], HostSource]"
    to_bf16: Callable[[Rows], NDArray[np.uint16]]

    def quantize(self, rows: Rows, scheme: Int4Group) -> Quantized:
        """The words lie in the lane's buffers, until its next call. Raises ResourceError where memory ends."""
        started = time.thread_time()
        try:
            made = self.lane.quantize(
                self.source_of(rows),
                group_size=scheme.group_size,
                scales=scheme.scales,
                signed=scheme.signed,
                levels=None if rows.importance_C is None else rows.importance_C.astype(np.int32),
            )
        except MemoryError as error:
            raise ResourceError(
                f"{self.lane.name} has no memory left", remedy="free it, or use another with --device"
            ) from error
        return Quantized(
            words=Int4Words(made.packed, made.scale),
            sums=(made.error2, made.weight2),
            encode_seconds=time.thread_time() - started,
        )


def _fp8_source(rows: Rows) -> "HostSource":
    from quantkit_kernels.staging import HostSource

    return HostSource(rows.parts["codes"], rows.parts["scale"], **fp8_place(rows))


def _float_source(rows: Rows) -> "HostSource":
    from quantkit_kernels.staging import HostSource

    return HostSource(kernel_values(rows))


# (source codec, target) -> what the GPU's kernel takes of rows; a test runs every key
ON_GPU: "dict[tuple[str, str], Callable[[Rows], HostSource]]" = {
    ("fp8_block", INT4_GROUP): _fp8_source,
    ("float_values", INT4_GROUP): _float_source,
}
