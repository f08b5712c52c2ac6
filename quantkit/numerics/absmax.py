"""INT4 by the largest magnitude: compressed-tensors 0.19 on a BF16 weight, in its own arithmetic.

Each operation is one of float32 rounded to BF16, as torch computes with BF16 tensors.
Suffixes: ``R`` rows, ``C`` columns, ``G`` groups along C, ``S`` group size.
"""

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.bfloat16 import from_float32, to_float32

ZERO_GROUP_SCALE = 0x3C00
"""BF16 2**-7, machine epsilon: what replaces a scale of zero, underflow included."""


def quantize_absmax(values_RC: NDArray[np.uint16], *, group_size: int) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
    """Codes and BF16 scales ``amax / 7.5``; quotients round to BF16, clamp, then round half to even."""
    num_rows, num_cols = values_RC.shape
    assert num_cols % group_size == 0, (num_cols, group_size)
    values_RGS = to_float32(values_RC).reshape(num_rows, num_cols // group_size, group_size)
    scale_RG = from_float32(np.abs(values_RGS).max(-1) / np.float32(7.5))
    scale_RG = np.where(scale_RG == 0, np.uint16(ZERO_GROUP_SCALE), scale_RG)
    quotient_RGS = to_float32(from_float32(values_RGS / to_float32(scale_RG)[..., None]))
    codes_RGS = np.rint(np.clip(quotient_RGS, -8, 7)).astype(np.int8)
    return codes_RGS.reshape(num_rows, num_cols), scale_RG
