"""INT4 with a zero point, ``weight = (code - zero) * scale``: scale and zero point of each group by search.

The search of search.py, with levels ``l = code - zero`` in the place of codes. Two lists of candidates: those of the
symmetric search, with zero 0, and scales that map the span of the group to so many steps, with the zero point that
puts the middle of the span into the middle of the levels. The best of each list gets its stored scale and its codes;
the smaller weighted error wins. So no group is worse than by the symmetric search with positive scales.

Bit budget: |x| < 2**18, w < 2**18, |l| <= 15, at most 2**7 elements. So ``|A| < 2**47`` and ``B < 2**33``: exact in
int64 and in float64, in any order. A product w*l is below 2**22: exact in float32.

Relative error of weights that were FP8, and in brackets what the search makes small, root mean squares; shifted is
normal with a mean of half a standard deviation in each group. ``scripts/tune_zero_points.py`` prints more:

| group | weights | min and max | signed symmetric search | this search |
|---|---|---|---|---|
| 32 | normal | 0.0810 (0.0679) | 0.0814 (0.0666) | 0.0769 (0.0631) |
| 32 | Student t, 5 | 0.0931 (0.0710) | 0.1041 (0.0742) | 0.0897 (0.0664) |
| 32 | shifted | 0.0724 (0.0627) | 0.0788 (0.0655) | 0.0684 (0.0581) |
| 64 | normal | 0.0913 (0.0763) | 0.0903 (0.0747) | 0.0872 (0.0722) |
| 128 | normal | 0.1007 (0.0839) | 0.0979 (0.0817) | 0.0955 (0.0798) |
| 128 | Student t, 5 | 0.1338 (0.0983) | 0.1449 (0.1038) | 0.1288 (0.0947) |

Suffixes: ``R`` rows, ``C`` columns, ``G`` groups along C, ``S`` group size.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics import search
from quantkit.numerics.absmax import ZERO_GROUP_SCALE
from quantkit.numerics.bfloat16 import MAX_FINITE, MIN_NORMAL, from_float64, to_float32

Encoded = tuple[NDArray[np.int8], NDArray[np.uint16], NDArray[np.int8]]
"""Codes -8..7, BF16 scales, zero points -8..7."""

SPANS: dict[int, tuple[float, ...]] = {
    32: (13.2, 14.2, 15.0, 15.6, 16.6),
    64: (13.8, 14.6, 15.2, 15.8, 17.2),
    128: (14.4, 15.2, 15.8, 16.4, 18.0),
}
"""Per group size, the steps that each candidate gives to the span, zero included; beyond 15 both ends are clamped."""


class _Groups(NamedTuple):
    x_RGS: NDArray[np.int64]
    weight_RGS: NDArray[np.int64]
    unit_RG: NDArray[np.float64]


class _Choice(NamedTuple):
    """A scale in steps of x, and a zero point."""

    ratio_RG: NDArray[np.float64]
    zero_RG: NDArray[np.int64]


class _Result(NamedTuple):
    codes_RGS: NDArray[np.int64]
    scale_RG: NDArray[np.uint16]
    zero_RG: NDArray[np.int64]
    gain_RG: NDArray[np.float64]


def quantize_search(
    ints_RC: NDArray[np.int32],
    unit_RG: NDArray[np.float64],
    *,
    group_size: int,
    importance_C: NDArray[np.uint16] | None = None,
) -> Encoded:
    """Codes, BF16 scales and zero points; ``importance_C``: from ``search.importance_levels``.

    Scales are positive. A zero group has codes and zero point 0 and the scale of absmax.
    """
    num_rows, num_cols = ints_RC.shape
    assert num_cols % group_size == 0, (num_cols, group_size)
    x_RGS = ints_RC.reshape(num_rows, num_cols // group_size, group_size).astype(np.int64)
    is_zero_RG = ~x_RGS.any(-1) | (unit_RG == 0)
    # a group of zeros is overwritten below
    unit_RG = np.where(is_zero_RG, 1.0, unit_RG)
    groups = _Groups(x_RGS, search.element_weights(x_RGS, importance_C), unit_RG)

    symmetric = _finish(groups, _best_choice(groups, _symmetric_candidates(x_RGS)))
    spanning = _finish(groups, _best_choice(groups, _span_candidates(x_RGS)))
    is_better_RG = spanning.gain_RG > symmetric.gain_RG
    codes_RGS = np.where(is_better_RG[..., None], spanning.codes_RGS, symmetric.codes_RGS)
    codes_RGS[is_zero_RG] = 0
    scale_RG = np.where(is_better_RG, spanning.scale_RG, symmetric.scale_RG)
    scale_RG[is_zero_RG] = ZERO_GROUP_SCALE
    zero_RG = np.where(is_better_RG & ~is_zero_RG, spanning.zero_RG, 0)
    return codes_RGS.astype(np.int8).reshape(num_rows, num_cols), scale_RG, zero_RG.astype(np.int8)


def _symmetric_candidates(x_RGS: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """What x is multiplied by, and the zero point."""
    amax_RG = np.maximum(np.abs(x_RGS).max(-1), 1).astype(np.float32)
    for steps in search.CANDIDATES[x_RGS.shape[-1]]:
        yield np.float32(steps) / amax_RG, np.zeros(amax_RG.shape, np.int64)


def _span_candidates(x_RGS: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """One float32 rounding an operation; the zero point half to even, then clamped."""
    low_RG = np.minimum(x_RGS.min(-1), 0)
    high_RG = np.maximum(x_RGS.max(-1), 0)
    span_RG = np.maximum(high_RG - low_RG, 1).astype(np.float32)
    ends_RG = (high_RG + low_RG).astype(np.float32)
    for steps in SPANS[x_RGS.shape[-1]]:
        inverse_RG = np.float32(steps) / span_RG
        # the middle of the levels is -0.5 - zero
        zero_RG = np.rint((ends_RG * inverse_RG + np.float32(1)) * np.float32(-0.5))
        yield inverse_RG, np.clip(zero_RG, -8, 7).astype(np.int64)


def _best_choice(groups: _Groups, candidates: Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]) -> _Choice:
    """A / B of the candidate with the highest score ``(A*A)/B`` in float64; the earliest one on ties."""
    best_score_RG = np.full(groups.unit_RG.shape, -1.0)
    best = _Choice(np.zeros(best_score_RG.shape), np.zeros(best_score_RG.shape, np.int64))
    for inverse_RG, zero_RG in candidates:
        a_RG, b_RG = _sums(groups, _round_levels(groups.x_RGS, inverse_RG, zero_RG))
        score_RG = a_RG * a_RG / b_RG
        is_better_RG = score_RG > best_score_RG
        best_score_RG = np.where(is_better_RG, score_RG, best_score_RG)
        best = _Choice(
            np.where(is_better_RG, a_RG / b_RG, best.ratio_RG), np.where(is_better_RG, zero_RG, best.zero_RG)
        )
    return best


def _finish(groups: _Groups, choice: _Choice) -> _Result:
    """The scale times the unit, rounded once to BF16; codes against that; by how much they lower the weighted error.

    With f steps of x a level the error is ``sum w*x*x - gain``, ``gain = (2A - f*B) * f``, in float64 from the left.
    """
    scale_RG = from_float64(np.clip(choice.ratio_RG * groups.unit_RG, MIN_NORMAL, MAX_FINITE))
    wide_RG = to_float32(scale_RG).astype(np.float64)
    inverse_RG = (groups.unit_RG / wide_RG).astype(np.float32)
    levels_RGS = _round_levels(groups.x_RGS, inverse_RG, choice.zero_RG)
    a_RG, b_RG = _sums(groups, levels_RGS)
    f_RG = wide_RG / groups.unit_RG
    gain_RG = (a_RG + a_RG - f_RG * b_RG) * f_RG
    return _Result(levels_RGS + choice.zero_RG[..., None], scale_RG, choice.zero_RG, gain_RG)


def _sums(groups: _Groups, levels_RGS: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A = sum w*x*l, and B = sum w*l*l but at least 1."""
    weighed_RGS = groups.weight_RGS * levels_RGS
    a_RG = (weighed_RGS * groups.x_RGS).sum(-1)
    b_RG = np.maximum((weighed_RGS * levels_RGS).sum(-1), 1)
    return a_RG.astype(np.float64), b_RG.astype(np.float64)


def _round_levels(
    x_RGS: NDArray[np.int64], inverse_RG: NDArray[np.float32], zero_RG: NDArray[np.int64]
) -> NDArray[np.int64]:
    """One float32 multiplication, half to even, then clamped to the levels of codes -8..7."""
    rounded_RGS = np.rint(x_RGS.astype(np.float32) * inverse_RG[..., None])
    zero_RG1 = zero_RG[..., None].astype(np.float32)
    levels_RGS: NDArray[np.float32] = np.clip(rounded_RGS, -8 - zero_RG1, 7 - zero_RG1)
    return levels_RGS.astype(np.int64)
