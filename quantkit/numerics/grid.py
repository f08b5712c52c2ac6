"""Weights as integers times one unit per group: what the scale search works on, exactly.

Suffixes: ``R`` rows, ``C`` columns, ``G`` groups along C, ``B`` blocks of the FP8 scale.
"""

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.fp8 import E4M3_INTS, E4M3_UNIT, dequantize, expand_blocks

Ints = NDArray[np.int32]
Units = NDArray[np.float64]


def value_grid(values_RC: NDArray[np.float32], *, group_size: int) -> tuple[Ints, Units]:
    """Each group on a grid of 2**-16 of its largest magnitude: |x| <= 65536; a zero group has unit 0.

    ``x = rint((v * 65536) / amax)`` in float64; the product is exact, the quotient rounds once.
    """
    num_rows, num_cols = values_RC.shape
    assert num_cols % group_size == 0, (num_cols, group_size)
    values_RGS = values_RC.reshape(num_rows, num_cols // group_size, group_size).astype(np.float64)
    amax_RG = np.abs(values_RGS).max(-1)
    divisor_RG = np.where(amax_RG == 0, 1.0, amax_RG)
    ints_RGS = np.rint(values_RGS * 65536.0 / divisor_RG[..., None])
    return ints_RGS.astype(np.int32).reshape(num_rows, num_cols), amax_RG * 2.0**-16


def has_one_scale_per_group(block_cols: int, group_size: int) -> bool:
    """Whether no group straddles two blocks, so that E4M3 codes are the grid already."""
    return block_cols % group_size == 0


def fp8_grid(
    codes_RC: NDArray[np.uint8],
    scale_BB: NDArray[np.float32],
    *,
    block: tuple[int, int],
    row_offset: int = 0,
    group_size: int,
) -> tuple[Ints, Units]:
    """The integers of the codes themselves where a group has one scale, else those of the decoded values."""
    num_rows, num_cols = codes_RC.shape
    assert num_cols % group_size == 0, (num_cols, group_size)
    if not has_one_scale_per_group(block[1], group_size):
        values_RC = dequantize(codes_RC, scale_BB, block=block, row_offset=row_offset)
        return value_grid(values_RC, group_size=group_size)
    scale_RG = expand_blocks(
        scale_BB,
        rows=num_rows,
        cols=num_cols // group_size,
        block=(block[0], block[1] // group_size),
        row_offset=row_offset,
    )
    return E4M3_INTS[codes_RC], scale_RG.astype(np.float64) * E4M3_UNIT
