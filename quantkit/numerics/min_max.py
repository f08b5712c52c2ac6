"""INT4 with a zero point by the smallest and the largest value: compressed-tensors 0.19 on a BF16 weight.

As absmax.py: each operation is one of float32 rounded to BF16, as torch computes with BF16 tensors.
Suffixes: ``R`` rows, ``C`` columns, ``G`` groups along C, ``S`` group size.
"""

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.absmax import ZERO_GROUP_SCALE
from quantkit.numerics.bfloat16 import from_float32, to_float32
from quantkit.numerics.zero_points import Encoded


def quantize_min_max(values_RC: NDArray[np.uint16], *, group_size: int) -> Encoded:
    """Codes, BF16 scales ``(max - min) / 15`` and zero points; the range includes zero.

    Where the scale underflows, the library divides by zero: the zero point is then 7 below zero, else 0 (from NaN).
    """
    num_rows, num_cols = values_RC.shape
    assert num_cols % group_size == 0, (num_cols, group_size)
    values_RGS = to_float32(values_RC).reshape(num_rows, num_cols // group_size, group_size)
    low_RG = np.minimum(values_RGS.min(-1), np.float32(0))
    high_RG = np.maximum(values_RGS.max(-1), np.float32(0))
    with np.errstate(over="ignore"):
        span_RG = high_RG - low_RG
    scale_RG = from_float32(_round(span_RG) / np.float32(15))
    is_zero_RG = scale_RG == 0
    scale_RG = np.where(is_zero_RG, np.uint16(ZERO_GROUP_SCALE), scale_RG)
    wide_RG = to_float32(scale_RG)
    zero_RG = np.rint(np.clip(_round(np.float32(-8) - _round(low_RG / wide_RG)), -8, 7))
    zero_RG = np.where(is_zero_RG, np.where(low_RG < 0, np.float32(7), np.float32(0)), zero_RG)
    shifted_RGS = _round(_round(values_RGS / wide_RG[..., None]) + zero_RG[..., None])
    codes_RGS = np.rint(np.clip(shifted_RGS, -8, 7)).astype(np.int8)
    return codes_RGS.reshape(num_rows, num_cols), scale_RG, zero_RG.astype(np.int8)


def _round(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return to_float32(from_float32(values))
