"""Importance matrices of llama.cpp in GGUF: ``NAME.in_sum2``, sums of squares, and ``NAME.counts``, the tokens in them.

Both are F32; experts lie one after the other, a count for each: ne is [channels, experts] and [1, experts]. Files that
were made of older ones have one count for all, and sums of one dimension. Other tensors (``NAME.in_sum``) are left
alone. (tools/imatrix/imatrix.cpp of ggml-org/llama.cpp, save_imatrix.)
The gguf package reads the header; the numbers are read as any other tensor here.
"""

import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.reader import read_chunks, read_tensor
from quantkit.errors import SourceError, not_installed
from quantkit.importance.file import MOST_CHARACTERS, REMEDY, Entry, fail
from quantkit.tensors import F32, TensorSpec

if TYPE_CHECKING:
    from gguf import GGUFReader

MAGIC = b"GGUF"
_ABOUT = ("datasets", "chunk_count", "chunk_size")
_SUMS, _COUNTS, _SUFFIX = ".in_sum2", ".counts", ".weight"
_MOST_TENSORS, _MOST_KEYS, _MOST_ITEMS = 1 << 17, 1 << 10, 1 << 12  # hundreds of each are usual, and of items one
_MOST_TOKENS = 1 << 53
_WHAT_READERS_RAISE = (ValueError, LookupError, TypeError, OverflowError, ArithmeticError, RecursionError)


def read_gguf(path: Path) -> tuple[Mapping[str, Entry], Mapping[str, str]]:
    """Entries by name without ``.weight``, and what the file says of itself.

    Raises SourceError for what is no importance matrix, UsageError where the gguf package is not installed.
    """
    try:
        from gguf import GGUFReader  # noqa: PLC0415  (for this format alone)
    except ImportError as error:
        raise not_installed("reading a GGUF file", "gguf", extra="imatrix", file=path) from error
    _check_begin(path)
    try:
        with np.errstate(over="raise"):
            reader = _bounded(GGUFReader)(path)
        kind = _words(reader, "general.type")
        about = {key: _words(reader, f"imatrix.{key}") for key in _ABOUT}
    except _WHAT_READERS_RAISE as error:
        raise SourceError(f"cannot be read as GGUF ({error})", file=path, remedy=REMEDY) from error
    if kind != "imatrix":
        fail(path, "is GGUF, but no importance matrix (its general.type is not imatrix)")
    _check_places(reader, path)
    stored = {tensor.name: _stored(tensor, path) for tensor in reader.tensors if tensor.name.endswith((_SUMS, _COUNTS))}
    entries = {}
    for name in stored:
        owner = name.removesuffix(_SUMS).removesuffix(_COUNTS)
        if owner + _SUMS not in stored or owner + _COUNTS not in stored:
            fail(path, "sums and counts do not go together: one of them is missing", tensor=name)
        key = owner.removesuffix(_SUFFIX)
        if key not in entries:
            entries[key] = _entry(stored[owner + _SUMS], stored[owner + _COUNTS])
    return entries, {key: value for key, value in about.items() if value}


def _check_begin(path: Path) -> None:
    """In which order bytes lie, and how many keys and tensors the file claims: a reader makes an object of each."""
    begin = b"".join(bytes(chunk) for chunk in read_chunks(path, 0, 24))
    if len(begin) < 24:
        fail(path, "is truncated")
    version, num_tensors, num_keys = struct.unpack("<IQQ", begin[4:])
    if not version & 0xFFFF:
        fail(path, "is big-endian GGUF, which is not read")
    if num_tensors > _MOST_TENSORS or num_keys > _MOST_KEYS:
        fail(path, f"claims {num_tensors} tensors and {num_keys} keys, which no importance matrix has")


def _check_places(reader: "GGUFReader", path: Path) -> None:
    """One behind another in the order of the header, each at the next multiple of the alignment: as ggml has it."""
    position = int(reader.data_offset)
    for tensor in reader.tensors:
        if int(tensor.data_offset) != position:
            begin = int(tensor.data_offset) - int(reader.data_offset)
            expected = position - int(reader.data_offset)
            fail(path, f"lies at byte {begin} of the data, where {expected} is its place", tensor=tensor.name)
        position += -(-int(tensor.n_bytes) // int(reader.alignment)) * int(reader.alignment)


def _bounded(base: "type[GGUFReader]") -> "type[GGUFReader]":
    """The reader without its trust: it takes what is missing for empty, and long arrays for real."""
    from gguf import GGUFValueType  # noqa: PLC0415

    class Bounded(base):  # type: ignore[misc, valid-type]
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError(f"it ends before {int(count)} items at byte {offset}")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == GGUFValueType.ARRAY:
                (item_type,), (length,) = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
                if item_type == GGUFValueType.ARRAY or length > _MOST_ITEMS:
                    raise ValueError(f"a key holds an array of {length} items or of arrays")
            return super()._get_field_parts(orig_offs, raw_type)

    return Bounded


def _words(reader: "GGUFReader", key: str) -> str:
    field = reader.get_field(key)
    found = None if field is None else field.contents()
    text = ", ".join(map(str, found)) if isinstance(found, list) else "" if found is None else str(found)
    return text[:MOST_CHARACTERS]


def _stored(tensor: Any, path: Path) -> StoredTensor:
    """In the order of numpy, the last dimension together, and without those of 1."""
    num_values = prod(int(size) for size in tensor.shape)
    if tensor.tensor_type.name != "F32" or not num_values or len(tensor.shape) > 4:
        fail(path, f"is {tensor.tensor_type.name} {tensor.shape.tolist()}, not F32 sums", tensor=tensor.name)
    shape = tuple(int(size) for size in reversed(tensor.shape) if size != 1) or (1,)
    stored = StoredTensor(tensor.name, TensorSpec(F32, shape), path, int(tensor.data_offset))
    if stored.end > path.stat().st_size:
        fail(path, f"claims {num_values} values, and the file ends before", tensor=tensor.name)
    return stored


def _entry(sums: StoredTensor, counts: StoredTensor) -> Entry:
    """Rows of the sums are what is counted: of turned dimensions every row would be a mixture of all experts'."""
    num_rows = sums.spec.shape[0] if len(sums.spec.shape) > 1 else 1
    num_counts = counts.spec.num_elements
    if len(sums.spec.shape) > 2 or counts.spec.shape != (num_counts,) or num_counts not in (1, num_rows):
        what = f"sums {list(sums.spec.shape)} do not go with counts {list(counts.spec.shape)}"
        fail(sums.path, f"{what}: [experts, channels] and one for each expert are expected", tensor=sums.name)
    numbers = read_tensor(counts).view(np.float32)
    if not (np.isfinite(numbers).all() and (numbers >= 0).all() and (numbers < _MOST_TOKENS).all()):
        fail(sums.path, "holds what is no number of tokens", tensor=counts.name)
    tokens = tuple(int(number) for number in np.rint(numbers))
    # of a file that was made of an older one: what marks an expert without tokens there has come along
    return Entry(values=sums, tokens=tokens, unseen=float(tokens[0]) if len(tokens) == 1 else None)
