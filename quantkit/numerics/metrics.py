"""The error of INT4 weights against their source, summed in one stated order.

Suffixes: ``R`` rows, ``C`` columns, ``G`` groups along C, ``S`` group size.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.bfloat16 import to_float32

Sums = NDArray[np.float64]


def error_rows(
    reference_RC: NDArray[Any],
    codes_RC: NDArray[np.int8],
    scale_RG: NDArray[np.uint16],
    group_size: int,
    zero_RG: NDArray[np.int8] | None = None,
    moments_C: NDArray[np.float64] | None = None,
) -> tuple[Sums, Sums]:
    """Per row, the sums of ``(v - (code - zero) * scale)**2`` and of ``v**2``, where v is the decoded source weight.

    All in float64: the product with the scale is exact; difference, squares and sums round one by one.
    A group is summed in the order of its elements, starting from 0, then a row in the order of its groups.
    ``moments_C``: what both squares are multiplied by before.
    """
    num_rows, num_cols = reference_RC.shape
    assert num_cols % group_size == 0, (num_cols, group_size)
    v_RGS = reference_RC.reshape(num_rows, num_cols // group_size, group_size).astype(np.float64)
    levels_RGS = codes_RC.reshape(v_RGS.shape)
    if zero_RG is not None:
        levels_RGS = levels_RGS - zero_RG[..., None]  # from -15 to 15
    error_RGS = v_RGS - levels_RGS * to_float32(scale_RG).astype(np.float64)[..., None]
    squares = error_RGS * error_RGS, v_RGS * v_RGS
    if moments_C is not None:
        moments_GS = moments_C.reshape(v_RGS.shape[1:])
        squares = squares[0] * moments_GS, squares[1] * moments_GS
    return _sum_in_order(squares[0]), _sum_in_order(squares[1])


def _sum_in_order(terms_RGS: NDArray[np.float64]) -> Sums:
    """np.add.accumulate adds one by one, unlike np.sum, which adds in pairs."""
    if terms_RGS.size == 0:
        return np.zeros(len(terms_RGS))
    groups_RG = np.add.accumulate(terms_RGS, axis=-1)[..., -1]
    return np.add.accumulate(groups_RG, axis=-1)[..., -1]
