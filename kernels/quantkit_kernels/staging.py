"""Numpy arrays through a GPU and back: one thread's stream and pinned buffers.

What a thread copies overlaps with what others compute: each has a stream of its own, and waits for that alone.
"""

from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit_kernels.requantize import Scales, Source, quantize, row_errors

_DTYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.uint16): torch.bfloat16,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.int32): torch.int32,
}


def count_gpus() -> int:
    """GPUs that torch sees."""
    return torch.cuda.device_count()


class HostSource(NamedTuple):
    """``Source`` in numpy: FP8 codes (uint8) with their scale, BF16 bits (uint16) or float32."""

    array: NDArray[Any]
    scale: NDArray[np.float32] | None = None
    block: tuple[int, int] = (1, 1)
    row_offset: int = 0


class HostInt4(NamedTuple):
    """``packed`` int32 [R, C / 8], ``scale`` BF16 bits uint16 [R, G], the two sums of ``RowErrors`` float64 [R].

    The first two lie in the lane's buffers, until its next call: they are written and done with. The sums are kept.
    """

    packed: NDArray[np.int32]
    scale: NDArray[np.uint16]
    error2: NDArray[np.float64]
    weight2: NDArray[np.float64]


class Lane:
    """One thread's way to a device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._is_cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._buffers: dict[str, torch.Tensor] = {}

    @property
    def name(self) -> str:
        return str(self.device)

    def quantize(
        self,
        source: HostSource,
        *,
        group_size: int,
        scales: Scales,
        signed: bool,
        levels: NDArray[np.int32] | None = None,
    ) -> HostInt4:
        """INT4 groups and their error; ``levels`` as ``requantize.quantize`` takes them.

        Raises MemoryError where the device has none left.
        """
        try:
            with self._on_device():
                array = self._upload("array", source.array).view(_DTYPES[source.array.dtype])
                scale = None if source.scale is None else self._upload("block scale", source.scale)
                on_device = Source(array, scale, source.block, source.row_offset)
                weights = None if levels is None else self._upload("levels", levels)
                int4 = quantize(on_device, group_size=group_size, scales=scales, signed=signed, levels=weights)
                errors = row_errors(on_device, int4, group_size=group_size)
                packed = self._download("packed", int4.packed)
                scale_bits = self._download("scale", int4.scale.view(torch.int16)).view(np.uint16)
                sums = [self._download(name, one) for name, one in errors._asdict().items()]
                if self._stream is not None:
                    self._stream.synchronize()
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        return HostInt4(packed, scale_bits, *(one.copy() for one in sums))

    def _on_device(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        if self._stream is not None:
            stack.enter_context(torch.cuda.device(self.device))
            stack.enter_context(torch.cuda.stream(self._stream))
        return stack

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory of this thread, as large as it ever had to be."""
        count = int(np.prod(shape))
        num_bytes = max(count * dtype.itemsize, 1)
        if name not in self._buffers or len(self._buffers[name]) < num_bytes:
            self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        return self._buffers[name][: count * dtype.itemsize].view(dtype).view(shape)

    def _upload(self, name: str, array: NDArray[Any]) -> torch.Tensor:
        """Through pinned memory: what is read from a memory map cannot be copied by the GPU itself."""
        dtype = torch.int16 if array.dtype == np.uint16 else _DTYPES[array.dtype]
        pinned = self._buffer(name, array.shape, dtype)
        np.copyto(pinned.numpy().view(array.dtype), array)
        return pinned.to(self.device, non_blocking=True)

    def _download(self, name: str, tensor: torch.Tensor) -> NDArray[Any]:
        pinned = self._buffer(name, tuple(tensor.shape), tensor.dtype)
        pinned.copy_(tensor, non_blocking=True)
        return pinned.numpy()
