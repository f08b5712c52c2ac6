"""Write a safetensors file whose layout is known beforehand: header first, tensors at their offsets in any order.

Our own writer because the safetensors library wants every tensor of a file in memory at once. Positioned writes
may come from many threads; ``close`` refuses to end a file in which a byte is missing.
"""

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.disk import named_errors, write_bytes
from quantkit.checkpoint.header import encode_header
from quantkit.tensors import TensorSpec

METADATA = {"format": "pt"}  # loaders refuse or crash without it


def order_tensors(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Widest dtype first, then by name: every tensor stays aligned, as the format allows no holes."""
    return {name: specs[name] for name in sorted(sorted(specs), key=lambda name: -specs[name].dtype.bits)}


class ShardWriter:
    """One output shard. ``close`` checks completeness and flushes to the disk."""

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] = METADATA) -> None:
        self.path = path
        self.specs = dict(specs)
        header = encode_header(self.specs, metadata)
        self._begin: dict[str, int] = {}
        self._incomplete = list(reversed(self.specs))  # the next in the file at the end
        self._written: dict[str, list[tuple[int, int]]] = {}  # spans of bytes, in order, merged where they meet
        position = len(header)
        for name, spec in self.specs.items():
            self._begin[name] = position
            self._written[name] = []
            position += spec.num_bytes
        self.file_bytes = position
        self._lock = threading.Lock()
        with named_errors(path):
            self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(self._descriptor, self.file_bytes)
                write_bytes(self._descriptor, header, 0)
            except OSError:
                self.abort()
                raise

    def write(self, name: str, array: NDArray[np.generic], *, first_byte: int = 0) -> None:
        """Bytes of ``array`` into tensor ``name``, from its byte ``first_byte`` on. Every byte is written once."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        data = memoryview(flat)  # type: ignore[arg-type]  # numpy arrays are buffers
        assert first_byte + len(data) <= self.specs[name].num_bytes, (name, first_byte, len(data))
        with named_errors(self.path):
            write_bytes(self._descriptor, data, self._begin[name] + first_byte)
        with self._lock:
            self._written[name] = _merged(self._written[name], (first_byte, first_byte + len(data)))

    def begin_of(self, name: str) -> int:
        """Where a tensor begins in the file."""
        return self._begin[name]

    @property
    def prefix_bytes(self) -> int:
        """Bytes from the beginning of the file on without a gap."""
        with self._lock:
            while self._incomplete:
                name = self._incomplete[-1]
                spans, num_bytes = self._written[name], self.specs[name].num_bytes
                if num_bytes and spans != [(0, num_bytes)]:
                    return self._begin[name] + (spans[0][1] if spans and spans[0][0] == 0 else 0)
                self._incomplete.pop()
            return self.file_bytes

    def close(self) -> None:
        """Flush to the disk. A byte that nobody wrote is a bug of ours."""
        for name, spec in self.specs.items():
            if spec.num_bytes and self._written[name] != [(0, spec.num_bytes)]:
                raise AssertionError(
                    f"{self.path.name}: {name}: written {self._written[name]} of {spec.num_bytes} bytes"
                )
        with named_errors(self.path):
            os.fsync(self._descriptor)
        self._close()

    def flush(self) -> None:
        """Make durable what is written so far, so that ``close`` has little left to wait for."""
        with named_errors(self.path):
            os.fdatasync(self._descriptor)

    def abort(self) -> None:
        """Remove the file unless it is complete: half a shard only takes room."""
        if self._descriptor >= 0:
            self._close()
            self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _merged(spans: list[tuple[int, int]], new: tuple[int, int]) -> list[tuple[int, int]]:
    """Spans with one more. Every byte is written once: an overlap is a bug of ours."""
    if new[0] == new[1]:
        return spans
    merged: list[tuple[int, int]] = []
    for span in sorted([*spans, new]):
        if merged and span[0] < merged[-1][1]:
            raise AssertionError(f"bytes {span} are written twice")
        if merged and span[0] == merged[-1][1]:
            merged[-1] = (merged[-1][0], span[1])
        else:
            merged.append(span)
    return merged
