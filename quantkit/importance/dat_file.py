"""Importance matrices in llama.cpp's older format, ``imatrix.dat``: no magic number, so everything is checked.

int32 number of entries; for each: int32 length of the name, name, int32 calls, int32 number of values, float32 values.
Then, where the writer was not among the first: int32 calls, int32 length, name of the data set. All little-endian.
Values are mean squares times the calls; how many tokens an expert saw is not told, and one that saw none has the calls
alone, in every channel. (tools/imatrix/imatrix.cpp of ggml-org/llama.cpp, save_imatrix_legacy.)
"""

import struct
from collections.abc import Mapping
from pathlib import Path

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.reader import read_chunks
from quantkit.importance.file import MOST_CHARACTERS, Entry, fail
from quantkit.tensors import F32, TensorSpec

_MOST_ENTRIES = 1 << 20
_LONGEST_NAME = 512
_LONGEST_DATASET = 4096
_SUFFIX = ".weight"


def read_dat(path: Path) -> tuple[Mapping[str, Entry], Mapping[str, str]]:
    """Entries by name without ``.weight``, and what the file says of itself. Raises SourceError for any other file."""
    cursor = _Cursor(path)
    (count,) = cursor.integers(1)
    if not 1 <= count <= _MOST_ENTRIES:
        fail(path, "is no statistics file, imatrix.gguf or imatrix.dat")
    entries: dict[str, Entry] = {}
    for number in range(count):
        (length,) = cursor.integers(1)
        if not 1 <= length <= _LONGEST_NAME:
            fail(path, f"has a name of {length} bytes in entry {number}")
        name = cursor.text(length)
        calls, num_values = cursor.integers(2)
        if calls < 0 or num_values < 1:
            fail(path, f"counts {calls} calls and {num_values} values", tensor=name)
        stored = StoredTensor(name, TensorSpec(F32, (num_values,)), path, cursor.position)
        if stored.end > cursor.file_bytes:
            fail(path, f"claims {num_values} values, and the file ends before", tensor=name)
        key = name.removesuffix(_SUFFIX)
        if key in entries:
            fail(path, "stands twice in the file", tensor=name)
        entries[key] = Entry(values=stored, unseen=float(max(calls, 1)))
        cursor.position = stored.end
    return entries, _ending(cursor)


def _ending(cursor: "_Cursor") -> Mapping[str, str]:
    if cursor.position == cursor.file_bytes:
        return {}
    calls, length = cursor.integers(2)
    if not 0 <= length <= _LONGEST_DATASET or cursor.position + length != cursor.file_bytes:
        fail(cursor.path, f"has {cursor.file_bytes - cursor.position} bytes behind its last entry")
    return {"calls": str(calls), "datasets": cursor.text(length)[:MOST_CHARACTERS]}


class _Cursor:
    """Positioned reads that never go behind the end."""

    def __init__(self, path: Path) -> None:
        self.path, self.position, self.file_bytes = path, 0, path.stat().st_size

    def take(self, num_bytes: int) -> bytes:
        if self.position + num_bytes > self.file_bytes:
            fail(self.path, "is truncated")
        data = b"".join(bytes(chunk) for chunk in read_chunks(self.path, self.position, self.position + num_bytes))
        self.position += num_bytes
        return data

    def integers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}i", self.take(4 * count))

    def text(self, num_bytes: int) -> str:
        try:
            return self.take(num_bytes).decode()
        except UnicodeDecodeError:
            fail(self.path, "holds a name that is not valid UTF-8")
