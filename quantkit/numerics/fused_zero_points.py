"""The numba twin of INT4 with zero points: decode, search, quantize, pack in one pass, same bytes as numpy.

``fused_cpu.error_rows_fp8`` and ``error_rows_values`` measure the result.
Suffixes: ``R`` rows, ``C`` columns, ``G`` groups along C, ``B`` blocks, ``W`` packed words.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.fused_arrays import (
    NO_SCALES,
    count_groups,
    decode_fp8,
    group_scales,
    importance_bytes,
    input_bytes,
    kind_of,
    scratch,
)
from quantkit.numerics.fused_values import FP8
from quantkit.numerics.fused_zero_tiles import quantize_zero_tiles
from quantkit.numerics.grid import has_one_scale_per_group
from quantkit.numerics.scale_choice import ScaleChoice
from quantkit.numerics.search import CANDIDATES
from quantkit.numerics.simd import LANES
from quantkit.numerics.zero_points import SPANS

Packed = tuple[NDArray[np.int32], NDArray[np.uint16], NDArray[np.int8]]
"""packed_RW, scale_RG, zero_RG"""


def _quantize(
    array_RC: NDArray[Any],
    kind: int,
    scale: NDArray[np.uint8],
    group_size: int,
    scales: ScaleChoice,
    importance_C: NDArray[np.uint16] | None,
) -> Packed:
    num_rows, num_cols = array_RC.shape
    groups_per_row, num_groups, padded_groups = count_groups(array_RC, group_size)
    packed = np.empty(padded_groups * group_size // 8, np.int32)
    int4_scale = np.empty(padded_groups, np.uint16)
    int4_zero = np.empty(padded_groups, np.int8)
    if num_groups:
        candidates = np.array(CANDIDATES[group_size] if scales == "search" else (), np.float32)
        quantize_zero_tiles(
            *(input_bytes(array_RC, LANES * group_size), kind, scale, padded_groups, group_size),
            *(candidates, np.array(SPANS[group_size], np.float32)),
            *(importance_bytes(importance_C, group_size), groups_per_row, scratch(), packed, int4_scale, int4_zero),
        )
    return (
        packed[: num_groups * group_size // 8].reshape(num_rows, num_cols // 8),
        int4_scale[:num_groups].reshape(num_rows, groups_per_row),
        int4_zero[:num_groups].reshape(num_rows, groups_per_row),
    )


def quantize_fp8(
    codes_RC: NDArray[np.uint8],
    scale_BB: NDArray[np.float32],
    *,
    block: tuple[int, int],
    row_offset: int = 0,
    group_size: int,
    scales: ScaleChoice,
    importance_C: NDArray[np.uint16] | None = None,
) -> Packed:
    """Packed INT4 words, BF16 scales and zero points of FP8 codes without NaN; scales are finite, 0 only over zeros."""
    if not has_one_scale_per_group(block[1], group_size):
        values_RC = decode_fp8(codes_RC, scale_BB, block, row_offset, np.float32)
        return quantize_values(values_RC, group_size=group_size, scales=scales, importance_C=importance_C)
    scale = group_scales(codes_RC, scale_BB, block, row_offset, group_size)
    return _quantize(codes_RC, FP8, scale, group_size, scales, importance_C)


def quantize_values(
    values_RC: NDArray[np.uint16] | NDArray[np.float32],
    *,
    group_size: int,
    scales: ScaleChoice,
    importance_C: NDArray[np.uint16] | None = None,
) -> Packed:
    """Packed INT4 words, BF16 scales and zero points of finite BF16 (uint16) or float32 values."""
    return _quantize(values_RC, kind_of(values_RC), NO_SCALES, group_size, scales, importance_C)
