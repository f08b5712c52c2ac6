"""KV scales that a checkpoint holds already: read, and refused where they cannot be meant."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.reader import read_tensor
from quantkit.engines.kv_scales import KEY_LEAF, SCALE_LEAVES, scale_of
from quantkit.errors import SourceError
from quantkit.numerics import bfloat16
from quantkit.tensors import BF16, F16, F32

_LEAST = float(np.finfo(np.float32).tiny)  # below it numbers are subnormal: 0 on a GPU, and their inverse infinite
_LARGEST = 1 / _LEAST  # beyond it their inverse is
_REMEDY = "leave KV scales out (1.0 is taken then), or calibrate them again"


class StoredKvScale(NamedTuple):
    """One tensor: least and largest of its numbers."""

    name: str
    least: float
    largest: float


def stored_kv_scales(tensors: Mapping[str, StoredTensor]) -> Iterator[StoredKvScale]:
    """All of them, in the order of their names.

    Raises SourceError for a number that is no scale (zero, negative, NaN, infinite, subnormal, or of a subnormal
    inverse), for one of k and v without the other, for two names of one scale that do not agree, and for what is no
    float: engines divide by them, take 1 in silence, or whichever of two they load last.
    """
    owners: dict[str, tuple[str, NDArray[np.float32]]] = {}
    found = {name: tensor for name, tensor in tensors.items() if name.endswith(SCALE_LEAVES)}
    for name, tensor in sorted(found.items()):
        other = _other(name)
        if other not in found:
            _fail(tensor, f"has no {other} beside it: engines give one's scale to the other, or stop")
        values = _values(tensor)
        if not values.size or not np.isfinite(values).all() or not (values > 0).all():
            bad = values[~(np.isfinite(values) & (values > 0))]
            _fail(tensor, f"is {bad[0]:g}, and a scale is above 0" if bad.size else "is empty")
        odd = values[(values < _LEAST) | (values > _LARGEST)]
        if odd.size:
            normal = f"a normal float32, as its inverse must, {_LEAST:.3g} to {_LARGEST:.3g}"
            _fail(tensor, f"is {odd[0]:g}: it must be {normal}")
        other_name, others = owners.setdefault(scale_of(name), (name, values))
        if not _is_same(values, others):
            _fail(tensor, f"is {_told(values)}, and {other_name}, another name of the same scale, is {_told(others)}")
        yield StoredKvScale(name, float(values.min()), float(values.max()))


def _other(name: str) -> str:
    """The name of v beside that of k, and the other way round."""
    head, leaf = name[: -len(KEY_LEAF)], name[-len(KEY_LEAF) :]
    mine, others = leaf[0], "v" if leaf == KEY_LEAF else "k"
    if head.endswith(f".{mine}_proj."):
        head = f"{head[: -len('k_proj.')]}{others}_proj."
    return f"{head}{others}_scale"


def _is_same(one: NDArray[np.float32], other: NDArray[np.float32]) -> bool:
    """A single number stands for every head."""
    return (one.size == other.size or 1 in (one.size, other.size)) and bool((one == other).all())


def _told(values: NDArray[np.float32]) -> str:
    least, largest = values.min(), values.max()
    return f"{least:g}" if least == largest else f"{least:g} to {largest:g}"


def _values(tensor: StoredTensor) -> NDArray[np.float32]:
    array = read_tensor(tensor) if tensor.spec.dtype in (BF16, F16, F32) else _fail(tensor, f"is {tensor.spec}")
    if tensor.spec.dtype == BF16:
        return bfloat16.to_float32(cast(bfloat16.Bits, array)).ravel()
    return array.astype(np.float32).ravel()


def _fail(tensor: StoredTensor, message: str) -> NoReturn:
    raise SourceError(message, tensor=tensor.name, file=tensor.path.name, remedy=_REMEDY)
