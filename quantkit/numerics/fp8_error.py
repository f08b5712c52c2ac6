"""What storing numbers in E4M3 loses, told from the histogram of their magnitudes.

Values are taken to lie evenly within their bin: each bin stands for sixteen magnitudes, and each of these is divided by
the scale, rounded and multiplied again exactly as a value would be. A bin is an eighth of an octave wide, and so is a
step of E4M3; its middle alone, which lies between two steps where the scale is a power of two, would double the error.
What a histogram cannot tell is where in its bin a value lies: all values of a bin at its one edge are told up to an
eighth too large or too small, and clipping is told in sixteenths of the bin in which it begins.

Legend: B bins, P points of a bin.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.fp8 import E4M3_MAX, round_e4m3
from quantkit.numerics.magnitudes import NUM_BINS, lower_edges

POINTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Error:
    """Sums over all values: how many there are and are clipped, their squares, the squares of their errors."""

    num_values: int = 0
    num_clipped: float = 0.0
    squares: float = 0.0
    squared_errors: float = 0.0

    def __add__(self, other: "Fp8Error") -> "Fp8Error":
        return Fp8Error(
            num_values=self.num_values + other.num_values,
            num_clipped=self.num_clipped + other.num_clipped,
            squares=self.squares + other.squares,
            squared_errors=self.squared_errors + other.squared_errors,
        )

    @property
    def clipped_fraction(self) -> float:
        """Of the values beyond 448 times the scale."""
        return self.num_clipped / self.num_values if self.num_values else 0.0

    @property
    def relative(self) -> float:
        """Root of the mean squared error over that of the values."""
        return float(np.sqrt(self.squared_errors / self.squares)) if self.squares else 0.0


def fp8_error(histogram_B: NDArray[np.int64], absmax: float, scale: float) -> Fp8Error:
    """Of values with this histogram, none of them above ``absmax``, stored divided by ``scale``."""
    used = np.flatnonzero(histogram_B)
    points_BP = np.minimum(_POINTS_BP[used], absmax)
    scaled_BP = points_BP / scale
    errors_BP = round_e4m3(scaled_BP) * scale - points_BP
    counts_B = histogram_B[used].astype(np.float64)
    return Fp8Error(
        num_values=int(histogram_B.sum()),
        num_clipped=float(counts_B @ (scaled_BP > E4M3_MAX).mean(axis=1)),
        squares=float(counts_B @ np.square(points_BP).mean(axis=1)),
        squared_errors=float(counts_B @ np.square(errors_BP).mean(axis=1)),
    )


def _points() -> NDArray[np.float64]:
    """[B, P]: zeros in the first bin; the last has no end and stands at its edge."""
    edges_B = lower_edges()
    widths_B = np.append(np.diff(edges_B), 0.0)
    widths_B[0] = 0.0
    fractions_P = (np.arange(POINTS) + 0.5) / POINTS
    points_BP: NDArray[np.float64] = edges_B[:, None] + widths_B[:, None] * fractions_P
    assert points_BP.shape == (NUM_BINS, POINTS)
    return points_BP


_POINTS_BP = _points()
