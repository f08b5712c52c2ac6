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
from quantkit.numerics.magnitudes import NUM_BINS, bins_of
from quantkit.statistics.file import Statistics
from quantkit.statistics.names import HISTOGRAM, KEY, LARGEST, LATENT, ROPE, TILE, VALUE

_MOST_COUNTS = 1 << 52  # in one bin: sums of all stay exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One kind of number: ``part`` is k, v, latent or rope."""

    part: str
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
    prefix = f"{root}layers.{layer}.self_attn"
    parts = [(prefix + name, rows) for name, rows in _expected(shape)]
    missing = [name for name, _ in parts if name + HISTOGRAM not in statistics or name + LARGEST not in statistics]
    if missing:
        have = next((name for name, _ in parts if name not in missing), None)
        lacks = f"is missing, and {have}{HISTOGRAM} is there" if have else "is missing: the layer was not visited"
        _fail(statistics, missing[0] + HISTOGRAM, lacks)
    return tuple(_read(statistics, name, rows) for name, rows in parts)


def _expected(shape: KvShape) -> Iterator[tuple[str, int]]:
    """Suffixes, and how many rows each has."""
    if isinstance(shape, HeadKv):
        yield from ((KEY, shape.num_kv_heads), (VALUE, shape.num_kv_heads))
        return
    assert isinstance(shape, LatentKv)
    yield LATENT, -(-shape.latent_dim // TILE)
    if shape.rope_dim:
        yield ROPE, 1


def _read(statistics: Statistics, name: str, rows: int) -> Observed:
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
        part=name.rpartition(".")[2],
        histogram_HB=cast(NDArray[np.int64], histogram),
        absmax_H=absmax.astype(np.float64),
    )


def _fail(statistics: Statistics, tensor: str, message: str) -> NoReturn:
    raise SourceError(
        message, tensor=tensor, file=statistics.path, remedy="calibrate again with text that reaches every layer"
    )
