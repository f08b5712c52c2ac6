"""Read stored tensors into numpy arrays, with positioned reads.

Positioned reads instead of a memory map: resident memory stays a few row blocks whatever the shard's size, and a
file that shrinks or fails while it is read is an error with a name, where a map would kill the process (SIGBUS).
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.disk import Buffer, write_bytes
from quantkit.checkpoint.header import StoredTensor
from quantkit.errors import SourceError
from quantkit.tensors import U8, TensorSpec
from quantkit.threads import StoppedError

CHUNK_BYTES = 8 << 20


def read_tensor(tensor: StoredTensor) -> NDArray[np.generic]:
    """The whole tensor; FP8 and E8M0 as uint8, BF16 as uint16. Raises SourceError when bytes are missing."""
    array = np.empty(tensor.spec.shape, dtype=tensor.spec.dtype.numpy)
    if array.nbytes:
        descriptor = _open(tensor.path, tensor.name)
        try:
            _read_into(descriptor, array, tensor)
        finally:
            os.close(descriptor)
    return array


def read_bytes(tensor: StoredTensor, first: int, last: int) -> NDArray[np.uint8]:
    """Bytes ``[first, last)`` of the tensor."""
    span = StoredTensor(tensor.name, TensorSpec(U8, (last - first,)), tensor.path, tensor.begin + first)
    return read_tensor(span).view(np.uint8)


def read_chunks(path: Path, first: int = 0, last: int | None = None) -> Iterator[memoryview]:
    """Bytes ``[first, last)`` of a file; each chunk is valid until the next. Raises SourceError where they fail."""
    view = memoryview(bytearray(CHUNK_BYTES))
    with os.fdopen(_open(path, None), "rb", buffering=0) as stream:
        stream.seek(first)
        while last is None or first < last:
            try:
                count = stream.readinto(view if last is None else view[: last - first])
            except OSError as error:
                raise SourceError(
                    f"cannot be read ({error.strerror})", file=path.name, remedy="check the disk, or download it again"
                ) from error
            if not count:
                return
            yield view[:count]
            first += count


def hash_file(path: Path, *, stop: Event | None = None) -> str:
    """sha256 of a file, in hexadecimal; ``StoppedError`` is raised soon after ``stop`` is set."""
    digest = Digest()
    digest.take(path, 0, None, stop=stop)
    return digest.hexadecimal


class Digest:
    """A sha256 that a file is fed to piece by piece, in order."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    @property
    def hexadecimal(self) -> str:
        return self._digest.hexdigest()

    def take(self, path: Path, first: int, last: int | None, *, stop: Event | None = None) -> None:
        """Bytes ``[first, last)``; ``StoppedError`` is raised soon after ``stop`` is set."""
        for chunk in read_chunks(path, first, last):
            if stop is not None and stop.is_set():
                raise StoppedError
            self.update(chunk)

    def update(self, piece: Buffer) -> None:
        """The bytes that come next."""
        self._digest.update(piece)


def copy_file(source: Path, target: Path, digest: Digest | None = None) -> None:
    """Copy the content, and feed it to a digest. SourceError for what cannot be read, OSError for what not written."""
    descriptor = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    try:
        for chunk in read_chunks(source):
            write_bytes(descriptor, chunk)
            if digest is not None:
                digest.update(chunk)
    finally:
        os.close(descriptor)


def _open(path: Path, tensor: str | None) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(
            f"cannot be opened ({error.strerror})",
            tensor=tensor,
            file=path.name,
            remedy="check that the file is there and readable",
        ) from error


def _read_into(descriptor: int, array: NDArray[np.generic], tensor: StoredTensor) -> None:
    view = memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # numpy arrays are buffers
    position = 0
    while position < len(view):
        try:
            count = os.preadv(descriptor, [view[position : position + (1 << 30)]], tensor.begin + position)
        except OSError as error:
            raise SourceError(
                f"cannot be read ({error.strerror})",
                tensor=tensor.name,
                file=tensor.path.name,
                remedy="check the disk, or download this shard again",
            ) from error
        if count == 0:
            raise SourceError(
                "ends early: the file was cut after its header was read",
                tensor=tensor.name,
                file=tensor.path.name,
                remedy="do not write to the source while it is converted",
            )
        position += count
