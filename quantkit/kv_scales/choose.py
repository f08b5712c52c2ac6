"""A scale from histograms: largest value, percentile, or least squared error. What is stored is the value over it.

``absmax``: the largest value becomes 448. ``percentile``: that share of the values other than zero, of each part by
itself, does not clip. ``mse``: the candidate with the least squared error of all values, by the histogram; 1.0 stands
before the others, so that it is taken where none is better, then the scale of the largest value and 32 smaller ones, an
eighth of an octave apart. ``unit``: 1.0.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import SourceError, UsageError
from quantkit.kv_scales.observed import Observed
from quantkit.numerics.fp8 import E4M3_MAX
from quantkit.numerics.fp8_error import Fp8Error, fp8_error
from quantkit.numerics.magnitudes import quantile

Method = Literal["absmax", "percentile", "mse", "unit"]
METHODS: tuple[Method, ...] = ("absmax", "percentile", "mse", "unit")
DEFAULT_METHOD: Method = "absmax"
DEFAULT_PERCENTILE = 99.99
_STEPS = 32  # smaller candidates than the scale of the largest value
_LEAST = float(np.finfo(np.float32).tiny)


def check_percentile(percentile: float) -> None:
    """Raise UsageError for what is none."""
    if not 50 <= percentile <= 100:
        raise UsageError(f"--percentile {percentile:g} is none of large values", remedy="give 50 to 100, 99.99 say")


def choose_scale(parts: Sequence[Observed], method: Method, percentile: float) -> np.float32:
    """One scale for all heads of all parts."""
    if method == "unit":
        return np.float32(1.0)
    absmax = max(part.absmax for part in parts)
    if method == "percentile":
        return scale_for(max(_percentile(part, percentile) for part in parts))
    return scale_for(absmax) if method == "absmax" else _least_error(parts, scale_for(absmax))


def _percentile(part: Observed, percentile: float) -> float:
    """Of what is not zero: zeros take any scale."""
    counts_B = part.all_heads().copy()
    counts_B[0] = 0
    return min(quantile(counts_B, percentile / 100), part.absmax) or part.absmax


def scales_of_heads(part: Observed, method: Method, percentile: float) -> NDArray[np.float32]:
    """[H] a scale for each head by itself."""
    heads = [
        Observed(part=part.part, histogram_HB=part.histogram_HB[[head]], absmax_H=part.absmax_H[[head]])
        for head in range(len(part.absmax_H))
    ]
    return np.array([choose_scale([head], method, percentile) for head in heads], np.float32)


def scale_for(largest: float) -> np.float32:
    """The least FP32 scale that does not clip this magnitude. Raises SourceError where that is no normal number."""
    scale = np.float32(largest / E4M3_MAX)
    if float(scale) * E4M3_MAX < largest:
        scale = np.nextafter(scale, np.float32(np.inf))
    if not (np.isfinite(scale) and scale >= _LEAST):
        raise SourceError(f"a largest value of {largest:g} gives no scale", remedy="look at what was calibrated")
    return scale


def error_of(part: Observed, scales: NDArray[np.float32]) -> Fp8Error:
    """Of all heads, each with its scale; a single one is everybody's."""
    scales_H = np.broadcast_to(scales.astype(np.float64), part.absmax_H.shape)
    rows = zip(part.histogram_HB, part.absmax_H, scales_H, strict=True)
    return sum((fp8_error(row_B, float(absmax), float(scale)) for row_B, absmax, scale in rows), Fp8Error())


def _least_error(parts: Sequence[Observed], largest: np.float32) -> np.float32:
    steps = [np.float32(float(largest) * 2.0 ** (-step / 8)) for step in range(_STEPS + 1)]
    candidates = [np.float32(1.0), *(one for one in steps if one >= _LEAST)]
    rows = [
        (row_B, float(absmax)) for part in parts for row_B, absmax in zip(part.histogram_HB, part.absmax_H, strict=True)
    ]
    errors = [sum(fp8_error(row_B, absmax, float(one)).squared_errors for row_B, absmax in rows) for one in candidates]
    return candidates[int(np.argmin(errors))]
