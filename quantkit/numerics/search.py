"""INT4 by searching each group's scale: weighted least squares on exact integers.

A group is integers x times a unit. Its large weights matter more than their share of the squared error,
so element i weighs ``w = rms + |x|``. A candidate maps the largest magnitude to d steps and so gives
codes l. The best scale for those codes is A / B with ``A = sum w*x*l`` and ``B = sum w*l*l``; the error
it leaves falls as ``A*A / B`` grows.

Where the second moments m of the input channels are known, as integers of 16 bits for each group,
``w = (rms + |x| / 2) * m``, cut to its 18 bits again, at least 1. The scale is then C / D of the best codes, with
``C = sum m*x*x`` and ``D = sum m*x*l``, at most an eighth above A / B: least squares makes every output of a layer a
little too small, and this one leaves it as large as it was. A group whose moments are all zero is searched as without.

Bit budget: |x| < 2**18, w < 2**18, |l| <= 8, at most 2**7 elements. So ``sum x*x < 2**43``, ``|A| <
2**46`` and ``B < 2**31``: exact in int64 and in float64, in any order. A term of B is below 2**24: exact
in float32 too. ``D < 2**44`` is exact, too; ``C < 2**59`` is exact in int64, and rounded once where it becomes float64.

Suffixes: ``R`` rows, ``C`` columns, ``G`` groups along C, ``S`` group size.
"""

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.absmax import ZERO_GROUP_SCALE
from quantkit.numerics.bfloat16 import MIN_NORMAL, from_float64, to_float32

MAX_WEIGHT = 2**18 - 1
MAX_IMPORTANCE = 2**16 - 1
MOST_UNBIASED = 1.125
"""How far above A / B a scale may be: C / D has no bound where the channels that count round to zero."""
_COMMON = (7.2, 7.8, 8.1, 8.4, 8.7)
CANDIDATES: dict[int, tuple[float, ...]] = {32: _COMMON, 64: _COMMON, 128: (*_COMMON, 12.8)}
"""Per group size, the code that each candidate gives the largest magnitude before clamping.

The last one of 128 clips at 5/8 of the largest magnitude, for groups with one far outlier.
"""


def importance_levels(moments_C: NDArray[np.float64], *, group_size: int) -> NDArray[np.uint16]:
    """Second moments, finite and not negative, as fractions of their group's largest in steps of 1/65,535.

    A channel is at least one step, unless its whole group is zero. Two divisions in float64, rounded half to even.
    """
    moments_GS = moments_C.reshape(-1, group_size).astype(np.float64)
    largest_G1 = moments_GS.max(-1, keepdims=True)
    is_known_G1 = largest_G1 > 0
    fraction_GS = moments_GS / np.where(is_known_G1, largest_G1, 1.0)
    levels_GS = np.maximum(np.rint(fraction_GS * MAX_IMPORTANCE), 1)
    return np.where(is_known_G1, levels_GS, 0).astype(np.uint16).reshape(-1)


def quantize_search(
    ints_RC: NDArray[np.int32],
    unit_RG: NDArray[np.float64],
    *,
    group_size: int,
    signed: bool,
    importance_C: NDArray[np.uint16] | None = None,
) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
    """Codes and BF16 scales; ``signed`` lets a scale be negative, so that the largest magnitude may use -8.

    ``importance_C``: from ``importance_levels``. The largest magnitude is the first one on ties. A zero group has
    codes 0 and the scale of absmax.
    """
    num_rows, num_cols = ints_RC.shape
    assert num_cols % group_size == 0, (num_cols, group_size)
    x_RGS = ints_RC.reshape(num_rows, num_cols // group_size, group_size).astype(np.int64)
    amax_RG1 = np.abs(x_RGS).max(-1, keepdims=True)
    is_zero_RG1 = (amax_RG1 == 0) | (unit_RG[..., None] == 0)
    # a group of zeros is searched as if its maximum were 1, and overwritten below
    amax_RG1 = np.maximum(amax_RG1, 1)

    flip_RG1 = np.ones_like(amax_RG1)
    if signed:
        first_RG1 = np.abs(x_RGS).argmax(-1)[..., None]
        flip_RG1 = np.where(np.take_along_axis(x_RGS, first_RG1, -1) > 0, -1, 1)
    y_RGS = flip_RG1 * x_RGS
    weight_RGS = element_weights(y_RGS, importance_C, shift=1)
    ratio_RG, best_RG1 = _best_ratio(y_RGS, weight_RGS, amax_RG1, CANDIDATES[group_size])
    if importance_C is not None:
        ratio_RG = _unbiased_ratio(y_RGS, _round_codes(y_RGS, best_RG1), importance_C, ratio_RG)

    scale_RG = from_float64(np.maximum(ratio_RG * unit_RG, MIN_NORMAL))
    inverse_RG = np.where(is_zero_RG1[..., 0], 0.0, unit_RG / to_float32(scale_RG).astype(np.float64))
    codes_RGS = _round_codes(y_RGS, inverse_RG.astype(np.float32)[..., None])
    scale_RG = np.where(flip_RG1[..., 0] < 0, scale_RG | np.uint16(0x8000), scale_RG)
    scale_RG = np.where(is_zero_RG1[..., 0], np.uint16(ZERO_GROUP_SCALE), scale_RG)
    return codes_RGS.astype(np.int8).reshape(num_rows, num_cols), scale_RG


def _best_ratio(
    y_RGS: NDArray[np.int64],
    weight_RGS: NDArray[np.int64],
    amax_RG1: NDArray[np.int64],
    candidates: tuple[float, ...],
) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """A / B, and what l is made with, of the highest score ``(A*A)/B`` in float64; the earliest one on ties."""
    best_score_RG = np.full(y_RGS.shape[:2], -1.0)
    best_ratio_RG = np.zeros(y_RGS.shape[:2])
    best_inverse_RG1 = np.zeros(amax_RG1.shape, np.float32)
    for steps in candidates:
        inverse_RG1 = np.float32(steps) / amax_RG1.astype(np.float32)
        l_RGS = _round_codes(y_RGS, inverse_RG1)
        a_RG = (weight_RGS * y_RGS * l_RGS).sum(-1).astype(np.float64)
        b_RG = np.maximum((weight_RGS * l_RGS * l_RGS).sum(-1), 1).astype(np.float64)
        score_RG = a_RG * a_RG / b_RG
        better_RG = score_RG > best_score_RG
        best_score_RG = np.where(better_RG, score_RG, best_score_RG)
        best_ratio_RG = np.where(better_RG, a_RG / b_RG, best_ratio_RG)
        best_inverse_RG1 = np.where(better_RG[..., None], inverse_RG1, best_inverse_RG1)
    return best_ratio_RG, best_inverse_RG1


def _unbiased_ratio(
    y_RGS: NDArray[np.int64],
    l_RGS: NDArray[np.int64],
    importance_C: NDArray[np.uint16],
    ratio_RG: NDArray[np.float64],
) -> NDArray[np.float64]:
    """C / D, within its bound, where moments are known; ``ratio_RG``: A / B."""
    importance_GS = importance_C.reshape(y_RGS.shape[1:]).astype(np.int64)
    c_RG = (importance_GS * y_RGS * y_RGS).sum(-1).astype(np.float64)
    d_RG = np.maximum((importance_GS * y_RGS * l_RGS).sum(-1), 1).astype(np.float64)
    return np.where(c_RG > 0, np.minimum(c_RG / d_RG, ratio_RG * MOST_UNBIASED), ratio_RG)


def element_weights(
    x_RGS: NDArray[np.int64], importance_C: NDArray[np.uint16] | None, *, shift: int = 0
) -> NDArray[np.int64]:
    """``rms + |x|``, saturating; where importance is known ``(rms + (|x| >> shift))``, saturating, times importance.

    The integer square root is exact: the mean square is below 2**52.
    """
    mean_square_RG1 = (x_RGS * x_RGS).sum(-1, keepdims=True) // x_RGS.shape[-1]
    rms_RG1 = np.floor(np.sqrt(mean_square_RG1.astype(np.float64))).astype(np.int64)
    size_RGS = np.abs(x_RGS)
    weight_RGS: NDArray[np.int64] = np.minimum(rms_RG1 + size_RGS, MAX_WEIGHT)
    if importance_C is None:
        return weight_RGS
    importance_GS = importance_C.reshape(x_RGS.shape[1:]).astype(np.int64)
    weighed_RGS = np.maximum((np.minimum(rms_RG1 + (size_RGS >> shift), MAX_WEIGHT) * importance_GS) >> 16, 1)
    return np.where(importance_GS > 0, weighed_RGS, weight_RGS)


def _round_codes(y_RGS: NDArray[np.int64], inverse_RG1: NDArray[np.float32]) -> NDArray[np.int64]:
    """One float32 multiplication, half to even, then clamped."""
    codes_RGS: NDArray[np.float32] = np.clip(np.rint(y_RGS.astype(np.float32) * inverse_RG1), -8, 7)
    return codes_RGS.astype(np.int64)
