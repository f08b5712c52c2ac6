"""Histograms of magnitudes: eight bins an octave, the steps of E4M3, cut out of the bits of a float32.

A bin is the exponent and the three highest bits of the mantissa, so that counting is exact and the same on every
device. Legend: B bins.
"""

import numpy as np
from numpy.typing import NDArray

BINS_PER_OCTAVE = 8
LEAST_EXPONENT, MOST_EXPONENT = -32, 24
NUM_BINS = (MOST_EXPONENT - LEAST_EXPONENT) * BINS_PER_OCTAVE + 2
"""The first bin counts what is below 2**-32, zero included, the last what is 2**24 and above."""

_BIAS, _SHIFT = 127, 20  # of float32: exponent bias, and what is left below three bits of mantissa
_FIRST = (LEAST_EXPONENT + _BIAS) * BINS_PER_OCTAVE


def bins_of(values: NDArray[np.float32]) -> NDArray[np.int32]:
    """The bin of each magnitude."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.int32) & 0x7FFFFFFF
    bins: NDArray[np.int32] = np.clip((bits >> _SHIFT) - _FIRST + 1, 0, NUM_BINS - 1)
    return bins


def lower_edges() -> NDArray[np.float64]:
    """[B] the least magnitude of each bin; 0 for the first."""
    position_B = np.arange(NUM_BINS - 1)
    exponent_B = LEAST_EXPONENT + position_B // BINS_PER_OCTAVE
    edges_B = np.ldexp(1 + position_B % BINS_PER_OCTAVE / BINS_PER_OCTAVE, exponent_B)
    return np.concatenate([[0.0], edges_B])


def centers() -> NDArray[np.float64]:
    """[B] the middle of each bin; 0 for the first, the edge for the last, which has no end."""
    edges_B = lower_edges()
    centers_B = edges_B.copy()
    centers_B[1:-1] = (edges_B[1:-1] + edges_B[2:]) / 2
    return centers_B


def quantile(histogram_B: NDArray[np.int64], fraction: float) -> float:
    """Upper edge of the bin in which that fraction of all counts is reached: at most an eighth too large.

    0 for a histogram of nothing, infinity where it is reached in the last bin.
    """
    total = int(histogram_B.sum())
    if not total:
        return 0.0
    reached = int(np.searchsorted(np.cumsum(histogram_B), min(int(np.ceil(fraction * total)), total)))
    edges_B = lower_edges()
    return float(edges_B[reached + 1]) if reached + 1 < NUM_BINS else float("inf")
