"""A directory of words: safetensors files, and a document behind them that says what they are and are of.

Each module has ``MODULE.packed`` (int32 [R, W], as compressed-tensors packs codes) and ``MODULE.scale`` (BF16 [R, G]).
A file appears whole, so that work goes on behind the last; the document appears last of all.
Suffixes: ``R`` rows, ``C`` columns, ``G`` groups along C, ``W`` packed words.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.checkpoint.disk import named_errors, write_whole
from quantkit.checkpoint.file_names import WORDS_NAME
from quantkit.checkpoint.header import StoredTensor, encode_header, read_header
from quantkit.checkpoint.json_files import MOST_INDEX_BYTES, read_json
from quantkit.checkpoint.reader import hash_file, read_tensor
from quantkit.checkpoint.whole_file import whole_shard
from quantkit.checkpoint.writer import METADATA, ShardWriter, order_tensors
from quantkit.errors import SourceError
from quantkit.numerics.bfloat16 import to_float32
from quantkit.numerics.packing import CODES_PER_WORD, Int4Words
from quantkit.tensors import BF16, I32, TensorSpec

PACKED, SCALE = ".packed", ".scale"
_AGAIN = "remove this directory, then run the same command again: it is made anew"


@dataclass(frozen=True, slots=True)
class WordsWriter:
    """One file of words while it is written. Any thread may add."""

    _shard: ShardWriter

    def add(self, module: str, words: Int4Words) -> None:
        """All rows of a module, once."""
        assert words.zero is None, module
        for suffix, array in ((PACKED, words.packed), (SCALE, words.scale)):
            assert self._shard.specs[module + suffix].shape == array.shape, (module, array.shape)
            self._shard.write(module + suffix, array)


@contextmanager
def write_words(path: Path, shapes: Mapping[str, tuple[int, int]], *, group_size: int) -> Iterator[WordsWriter]:
    """There and whole where the block ends well. ``shapes``: rows and columns of every module in it."""
    with whole_shard(path, _specs(shapes, group_size)) as shard:
        yield WordsWriter(shard)


def words_bytes(shapes: Mapping[str, tuple[int, int]], *, group_size: int) -> int:
    """Of the file that ``write_words`` makes of these modules, its header included."""
    specs = _specs(shapes, group_size)
    return len(encode_header(specs, METADATA)) + sum(spec.num_bytes for spec in specs.values())


def _specs(shapes: Mapping[str, tuple[int, int]], group_size: int) -> dict[str, TensorSpec]:
    """In the order of the file."""
    specs: dict[str, TensorSpec] = {}
    for module, (num_rows, num_cols) in shapes.items():
        specs[module + PACKED] = TensorSpec(I32, (num_rows, num_cols // CODES_PER_WORD))
        specs[module + SCALE] = TensorSpec(BF16, (num_rows, num_cols // group_size))
    return order_tensors(specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A complete directory. ``document``: what was run, over what; ``sha256``: of all files and the document.

    ``searched``: modules that are not here, since nothing was found for them.
    """

    directory: Path
    document: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    sha256: str

    @property
    def modules(self) -> frozenset[str]:
        return frozenset(name.removesuffix(PACKED) for name in self.tensors if name.endswith(PACKED))

    @property
    def summary(self) -> dict[str, Any]:
        """For a manifest: all but the names of modules and files."""
        told = {key: value for key, value in self.document.items() if key not in ("files", "searched")}
        counts = {"num_calibrated": len(self.modules), "num_searched": len(self.searched)}
        return {**told, **counts, "words_sha256": self.sha256}

    @property
    def searched(self) -> frozenset[str]:
        return frozenset(self.document["searched"])

    def read(self, module: str, first_row: int, last_row: int, *, signed: bool) -> Int4Words:
        """Rows ``[first_row, last_row)``. Raises SourceError for a scale that cannot be, or must not be below zero."""
        packed, scale = (self.tensors[module + suffix].rows(first_row, last_row) for suffix in (PACKED, SCALE))
        words = Int4Words(read_tensor(packed).view(np.int32), read_tensor(scale).view(np.uint16))
        values_RG = to_float32(words.scale)
        wrong_RG = ~np.isfinite(values_RG) | (values_RG == 0) | (not signed and values_RG < 0)
        if wrong_RG.any():
            row, group = np.argwhere(wrong_RG)[0]
            what = f"holds the scale {values_RG[row, group]} for row {first_row + row}, group {group}"
            raise SourceError(what, tensor=module, file=scale.path, remedy=_AGAIN)
        return words

    def check_files(self) -> None:
        """Hash all files. Raises SourceError for one that is not what it was as the document was written."""
        for name, sha256 in self.document["files"].items():
            path = self.directory / name
            if path.is_symlink() or hash_file(path) != sha256:
                raise SourceError(
                    "is not what it was when it was made", file=path, remedy="give --no-resume to make all words anew"
                )

    def check_modules(self, shapes: Mapping[str, tuple[int, int]], *, group_size: int) -> None:
        """Raise SourceError unless these are words of exactly these modules, in groups of this size."""
        strange = sorted(self.modules - shapes.keys())
        missing = sorted(shapes.keys() - self.modules - self.searched)
        if strange or missing:
            what = f"holds words of {strange[0]}, which is not INT4" if strange else f"holds no words of {missing[0]}"
            raise SourceError(what, file=self.directory, remedy=_AGAIN)
        for module in sorted(self.modules):
            num_rows, num_cols = shapes[module]
            found = (self.tensors[module + PACKED].spec.shape, self.tensors[module + SCALE].spec.shape)
            if found != ((num_rows, num_cols // CODES_PER_WORD), (num_rows, num_cols // group_size)):
                raise SourceError(
                    f"holds words of {found}, and the weight is {[num_rows, num_cols]} in groups of {group_size}",
                    tensor=module,
                    file=self.directory,
                    remedy=_AGAIN,
                )


def finish_words(directory: Path, document: Mapping[str, Any], *, searched: Collection[str] = ()) -> None:
    """Write the document: all files of words are there. It holds their hashes."""
    files = {path.name: hash_file(path) for path in _files(directory)}
    path = directory / WORDS_NAME
    with named_errors(path):
        text = json.dumps({**document, "searched": sorted(searched), "files": files}, indent=2, sort_keys=True)
        write_whole(path, text.encode() + b"\n")


def has_words(directory: Path) -> bool:
    """Whether all of them are there."""
    return (directory / WORDS_NAME).is_file()


def open_words(directory: Path) -> Words:
    """Raises SourceError for files that are not those that the document names, or are no words."""
    path = directory / WORDS_NAME
    document = read_json(path, what="words of calibration have it", most_bytes=MOST_INDEX_BYTES)
    files = _files(directory)
    if not isinstance(document.get("searched"), list) or not isinstance(document.get("files"), dict):
        raise SourceError("is no document of words", file=path, remedy=_AGAIN)
    if {file.name for file in files} != document["files"].keys():
        raise SourceError("holds other files than its document names", file=directory, remedy=_AGAIN)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in read_header(file).tensors:
            expected = {PACKED: I32, SCALE: BF16}.get("." + tensor.name.rpartition(".")[2])
            if tensor.spec.dtype != expected or tensor.name in tensors or len(tensor.spec.shape) != 2:
                raise SourceError(f"is {tensor.spec}, no words", tensor=tensor.name, file=file, remedy=_AGAIN)
            tensors[tensor.name] = tensor
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if module + (SCALE if leaf == PACKED[1:] else PACKED) not in tensors:
            raise SourceError("has words or scales alone", tensor=module, file=directory, remedy=_AGAIN)
    return Words(directory=directory, document=document, tensors=tensors, sha256=hash_file(path))


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))
