"""Parse and check safetensors headers without reading tensor data.

Our own parser because headers are untrusted input and every way of being wrong wants its own message.
Format: 8 bytes little-endian header length, JSON, then tensor bytes without holes or overlaps.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from quantkit.errors import SourceError
from quantkit.tensors import DTYPES, DType, TensorSpec

MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses longer ones too
_LENGTH_BYTES = 8
_LARGEST_COUNT = 1 << 50  # elements, bytes: a petabyte
_MAX_DIMENSIONS = 32
_INTEGER = {int}
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_DOWNLOAD_AGAIN = "download this shard again"
_CORRUPT = "the file is corrupt; download it again"


class StoredTensor(NamedTuple):
    """A contiguous run of bytes in a file: ``begin`` is absolute, the length follows from ``spec``.

    A tuple, since there are half a million and a frozen dataclass takes twice as long to make.
    """

    name: str
    spec: TensorSpec
    path: Path
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.spec.num_bytes

    def rows(self, first: int, last: int, *, name: str | None = None) -> "StoredTensor":
        """Rows ``[first, last)`` along the first dimension, as a tensor of its own."""
        row_shape = self.spec.shape[1:]
        row_bytes = prod(row_shape) * self.spec.dtype.num_bytes
        spec = TensorSpec(self.spec.dtype, (last - first, *row_shape))
        return StoredTensor(name or self.name, spec, self.path, self.begin + first * row_bytes)

    def item(self, index: int, *, name: str) -> "StoredTensor":
        """Element ``index`` along the first dimension, that dimension dropped."""
        one = self.rows(index, index + 1, name=name)
        return StoredTensor(name, TensorSpec(self.spec.dtype, self.spec.shape[1:]), self.path, one.begin)


@dataclass(frozen=True, slots=True)
class Header:
    """One safetensors file: its tensors in file order, its string metadata, its length in bytes."""

    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str]
    file_bytes: int


def read_header(path: Path) -> Header:
    """Header of one safetensors file, checked against the file's length.

    Raises SourceError naming the file, and the tensor where one is at fault.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as stream:
            begin = stream.read(_LENGTH_BYTES)
            begin += stream.read(header_end(begin, path, file_bytes) - _LENGTH_BYTES)
    except OSError as error:
        raise SourceError(
            f"cannot be read ({error.strerror})",
            file=path.name,
            remedy="check that the file is there and readable",
        ) from error
    return parse_header(begin, path, file_bytes)


def header_end(begin: bytes, path: Path, file_bytes: int) -> int:
    """Where the header of a file of this length ends, by the file's first bytes: how many ``parse_header`` needs."""
    prefix = begin[:_LENGTH_BYTES]
    if len(prefix) < _LENGTH_BYTES:
        _fail(path, f"is {len(prefix)} bytes long, too short for a safetensors file", remedy=_DOWNLOAD_AGAIN)
    length = int.from_bytes(prefix, "little")
    if looks_like_text(begin):
        _fail(path, "is a text, and no safetensors file", remedy="name a safetensors file")
    if length > MAX_HEADER_BYTES:
        _fail(
            path,
            f"claims a header of {length} bytes, more than the {MAX_HEADER_BYTES} that the format allows",
            remedy="this is not a safetensors file; download it again",
        )
    if length > file_bytes - _LENGTH_BYTES:
        _fail(path, f"claims a header of {length} bytes but is {file_bytes} bytes long", remedy=_DOWNLOAD_AGAIN)
    return _LENGTH_BYTES + length


def looks_like_text(begin: bytes) -> bool:
    """Do these first bytes of a file, eight at least, read as UTF-8 without control characters?

    Those of safetensors, GGUF and imatrix.dat do not: the length or count that they begin with has zeros.
    """
    text = begin.decode("utf-8", errors="replace").rstrip("\ufffd")  # cut within a character
    return bool(text) and "\ufffd" not in text and all(one.isprintable() or one in "\t\n\r\f" for one in text)


def parse_header(begin: bytes, path: Path, file_bytes: int) -> Header:
    """Header of a file whose first bytes are at hand; ``path`` need not be there. Raises as ``read_header`` does."""
    data_begin = header_end(begin, path, file_bytes)
    if len(begin) < data_begin:
        _fail(path, "ends inside its header", remedy=_DOWNLOAD_AGAIN)
    entries = _parse_json(begin[_LENGTH_BYTES:data_begin], path)
    metadata = _metadata(entries.pop("__metadata__", {}), path)
    tensors = sorted(
        (_tensor(name, entry, path, data_begin) for name, entry in entries.items()),
        key=lambda tensor: (tensor.begin, tensor.spec.num_bytes),
    )
    _check_coverage(tensors, path, data_begin, file_bytes)
    return Header(tuple(tensors), metadata, file_bytes)


def encode_header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Length, JSON and padding for tensors that lie one behind another in the order given."""
    document: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, spec in specs.items():
        end = offset + spec.num_bytes
        document[name] = {"dtype": spec.dtype.name, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _fail(path: Path, message: str, *, remedy: str = _CORRUPT, tensor: str | None = None) -> NoReturn:
    raise SourceError(message, remedy=remedy, tensor=tensor, file=path.name)


def _parse_json(text: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(pairs)
        if len(seen) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            _fail(path, "stands twice in the header", tensor=next(key for key in counts if counts[key] > 1))
        return seen

    try:
        document = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"its header is not JSON ({error})", file=path.name, remedy=_CORRUPT) from error
    if not isinstance(document, dict):
        _fail(path, "its header is not a JSON object")
    if not _is_text("".join(document)):
        name = next(name for name in document if not _is_text(name))
        _fail(path, "a tensor name is not valid UTF-8", tensor=ascii(name), remedy="the file is corrupt")
    return document


def _is_text(name: str) -> bool:
    """Whether it has no lone surrogates, which JSON can hold and no file can."""
    return name == name.encode(errors="replace").decode()


def _metadata(value: Any, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        _fail(path, "__metadata__ is not a map of strings")
    return value


def _is_span(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    begin, end = value
    return type(begin) is int is type(end) and 0 <= begin < _LARGEST_COUNT and 0 <= end < _LARGEST_COUNT


@lru_cache(maxsize=1 << 14)
def _spec(dtype: DType, shape: tuple[int, ...]) -> TensorSpec | None:
    """One for all tensors that are alike; None for what is no shape."""
    return TensorSpec(dtype, shape) if all(0 <= size < _LARGEST_COUNT for size in shape) else None


def _tensor(name: str, entry: Any, path: Path, data_begin: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        _fail(path, "its header entry is not {dtype, shape, data_offsets}", tensor=name)
    shape, offsets = entry["shape"], entry["data_offsets"]
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        remedy = f"supported: {', '.join(DTYPES)}"
        _fail(path, f"has dtype {entry['dtype']!r}, which is not supported", tensor=name, remedy=remedy)
    is_shape = isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS and set(map(type, shape)) <= _INTEGER
    spec = _spec(dtype, tuple(shape)) if is_shape else None
    if spec is None:
        _fail(path, f"has shape {str(shape)[:80]}", tensor=name)
    if not _is_span(offsets):
        _fail(path, f"has data_offsets {offsets!r}", tensor=name)
    begin, end = offsets
    if end - begin != spec.num_bytes:
        _fail(path, f"{spec} needs {spec.num_bytes} bytes, its data_offsets span {end - begin}", tensor=name)
    return StoredTensor(name, spec, path, data_begin + begin)


def _check_coverage(tensors: list[StoredTensor], path: Path, data_begin: int, file_bytes: int) -> None:
    position, previous = data_begin, "the header"
    for tensor in tensors:
        if tensor.begin < position:
            _fail(path, f"overlaps {previous}", tensor=tensor.name)
        if tensor.begin > position:
            hole = tensor.begin - position
            _fail(path, f"leaves a hole of {hole} bytes behind {previous}", tensor=tensor.name)
        position, previous = tensor.end, tensor.name
    if position > file_bytes:
        _fail(
            path,
            f"is truncated: its header describes {position} bytes, the file has {file_bytes}",
            remedy=_DOWNLOAD_AGAIN,
        )
    if position < file_bytes:
        _fail(path, f"has {file_bytes - position} bytes behind its last tensor")
