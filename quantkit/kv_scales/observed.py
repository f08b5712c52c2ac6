"""What calibration saw of the keys and values of a layer, or of its latent rows.

Legend: H heads, or tiles of a latent; B bins.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import SourceError
from quantkit.families.kv_shape import HeadKv, KvShape, LatentKv
from quantkit.module_names import layer_name
from quantkit.numerics.magnitudes import NUM_BINS, bins_of
from quantkit.statistics.file import Statistics
from quantkit.statistics.names import HISTOGRAM, LARGEST, TILE, KvPart

_MOST_COUNTS = 1 << 52  # in one bin: sums of all stay exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One kind of number."""

    part: KvPart
    histogram_HB: NDArray[np.int64]
    absmax_H: NDArray[np.float64]

    def all_heads(self) -> NDArray[np.int64]:
        """[B] of all heads together."""
        total: NDArray[np.int64] = self.histogram_HB.sum(axis=0)
        return total

    @property
    def absmax(self) -> float:
        return float(self.absmax_H.max())


def observed(statistics: Statistics, shape: KvShape, root: str, layer: int) -> tuple[Observed, ...]:
    """Keys and values, or latent and rope part, of one layer.

    Raises SourceError for a layer that was not visited, for one of the two that is missing, and for a shape that is not
    this model's.
    """
    attention = f"{layer_name(root, layer)}.self_attn"
    parts = [(f"{attention}.{part}", part, rows) for part, rows in _expected(shape)]
    missing = [name for name, *_ in parts if name + HISTOGRAM not in statistics or name + LARGEST not in statistics]
    if missing:
        have = next((name for name, *_ in parts if name not in missing), None)
        lacks = f"is missing, and {have}{HISTOGRAM} is there" if have else "is missing: the layer was not visited"
        _fail(statistics, missing[0] + HISTOGRAM, lacks)
    return tuple(_read(statistics, name, part, rows) for name, part, rows in parts)


def _expected(shape: KvShape) -> Iterator[tuple[KvPart, int]]:
    """Parts, and how many rows each has."""
    if isinstance(shape, HeadKv):
        yield from ((KvPart.KEY, shape.num_kv_heads), (KvPart.VALUE, shape.num_kv_heads))
        return
    assert isinstance(shape, LatentKv)
    yield KvPart.LATENT, -(-shape.latent_dim // TILE)
    if shape.rope_dim:
        yield KvPart.ROPE, 1


def _read(statistics: Statistics, name: str, part: KvPart, rows: int) -> Observed:
    histogram, absmax = statistics.read(name + HISTOGRAM), statistics.read(name + LARGEST)
    for leaf, array, shape in ((HISTOGRAM, histogram, (rows, NUM_BINS)), (LARGEST, absmax, (rows,))):
        if array.shape != shape:
            _fail(statistics, name + leaf, f"has shape {list(array.shape)}, and this model has {list(shape)}")
    if histogram.dtype != np.int64 or (histogram > _MOST_COUNTS).any():
        _fail(statistics, name + HISTOGRAM, "holds no counts")
    if absmax.dtype != np.float32:
        _fail(statistics, name + LARGEST, "holds no magnitudes")
    empty = np.flatnonzero((histogram.sum(axis=1) == 0) | (absmax == 0))
    if empty.size:
        _fail(statistics, name + HISTOGRAM, f"row {empty[0]} saw no value other than 0: a scale would be 0")
    highest = NUM_BINS - 1 - (histogram[:, ::-1] > 0).argmax(axis=1)
    wrong = np.flatnonzero(bins_of(absmax.astype(np.float32)) != highest)
    if wrong.size:
        _fail(
            statistics, name + LARGEST, f"row {wrong[0]}: its largest value is not in the highest bin that counts any"
        )
    return Observed(
        part=part,
        histogram_HB=cast(NDArray[np.int64], histogram),
        absmax_H=absmax.astype(np.float64),
    )


def _fail(statistics: Statistics, tensor: str, message: str) -> NoReturn:
    raise SourceError(
        message, tensor=tensor, file=statistics.path, remedy="calibrate again with text that reaches every layer"
    )
