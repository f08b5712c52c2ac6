"""Read and write a statistics file: safetensors, one tensor for each thing that was measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.header import StoredTensor, read_header
from quantkit.checkpoint.reader import read_tensor
from quantkit.checkpoint.whole_file import check_new_file, whole_shard
from quantkit.errors import SourceError
from quantkit.statistics.fingerprint import Fingerprint, fingerprint_from
from quantkit.tensors import F32, I64, TensorSpec

Array = NDArray[np.float32 | np.int64]

VERSION = "1"
_VERSION_KEY, _MODEL_KEY, SAMPLES_KEY = "quantkit_statistics", "model", "model_samples"
_REMEDY = "make it with quantkit calibrate"
_DTYPES = {np.dtype(np.float32): F32, np.dtype(np.int64): I64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A statistics file, its header read. ``model``: digest of the norms of what was run (`weights.identity`)."""

    path: Path
    model: str
    metadata: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str) -> Array:
        """One tensor. Raises SourceError for what no calibration writes: NaN, infinities, anything below zero."""
        array = cast(Array, read_tensor(self.tensors[name]))
        if not np.isfinite(array).all() or (array < 0).any():
            raise SourceError(
                "holds a NaN, an infinity or a number below 0", tensor=name, file=self.path, remedy=_REMEDY
            )
        return array

    @property
    def fingerprint(self) -> Fingerprint:
        return fingerprint_from(self.model, self.metadata.get(SAMPLES_KEY, ""))

    def check_model(self, fingerprint: Fingerprint) -> None:
        """Raise SourceError unless these are statistics of that model."""
        check_fingerprint(self.fingerprint, fingerprint, self.path)


def open_statistics(path: Path) -> Statistics:
    """Raises SourceError for a file that is none, or is of another version."""
    header = read_header(path)
    found = header.metadata.get(_VERSION_KEY)
    if found != VERSION:
        what = "is no statistics file" if found is None else f"is a statistics file of version {found}"
        raise SourceError(f"{what} (this tool reads version {VERSION})", file=path, remedy=_REMEDY)
    for tensor in header.tensors:
        if tensor.spec.dtype not in (F32, I64):
            raise SourceError(f"is {tensor.spec}, not F32 or I64", tensor=tensor.name, file=path, remedy=_REMEDY)
    return Statistics(
        path=path,
        model=header.metadata.get(_MODEL_KEY, ""),
        metadata=header.metadata,
        tensors={tensor.name: tensor for tensor in header.tensors},
    )


def fingerprint_of(metadata: Mapping[str, str]) -> Fingerprint | None:
    """Of the model, as the metadata of a statistics file say it; None of another file."""
    if _VERSION_KEY not in metadata:
        return None
    return fingerprint_from(metadata.get(_MODEL_KEY, ""), metadata.get(SAMPLES_KEY, ""))


def check_fingerprint(found: Fingerprint, expected: Fingerprint, path: Path) -> None:
    """Raise SourceError where the statistics of ``path`` are not of the model that is expected."""
    difference = found.difference(expected)
    if difference is not None:
        raise SourceError(
            f"was made from another model or revision: {difference} differ",
            file=path,
            remedy="calibrate this checkpoint, or one of the same revision in another format",
        )


def write_statistics(path: Path, arrays: Mapping[str, Array], *, model: Fingerprint, about: Mapping[str, str]) -> None:
    """The file appears whole or not at all. ``about``: what else is told of it, as strings.

    The same arrays give the same bytes. Raises UsageError where the file is there already.
    """
    specs = {name: TensorSpec(_DTYPES[array.dtype], array.shape) for name, array in arrays.items()}
    _write(path, specs, arrays.__getitem__, model=model, about=about)


def join_statistics(path: Path, parts: Sequence[Statistics], *, model: Fingerprint, about: Mapping[str, str]) -> None:
    """All tensors of several files in one, read one by one. Raises as ``write_statistics``."""
    owners = {name: part for part in parts for name in part.tensors}
    specs = {name: part.tensors[name].spec for name, part in owners.items()}
    _write(path, specs, lambda name: owners[name].read(name), model=model, about=about)


def _write(
    path: Path,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], Array],
    *,
    model: Fingerprint,
    about: Mapping[str, str],
) -> None:
    check_new_file(path)
    metadata = {"format": "pt", _VERSION_KEY: VERSION, _MODEL_KEY: model.norms, SAMPLES_KEY: model.text, **about}
    with whole_shard(path, specs, metadata) as writer:
        for name in writer.specs:
            writer.write(name, read(name))
