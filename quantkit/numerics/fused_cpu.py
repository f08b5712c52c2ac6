"""The numba twin of the conversion path: decode, search, quantize, pack in one pass, same bytes as numpy.

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
from quantkit.numerics.fused_tiles import quantize_tiles
from quantkit.numerics.fused_values import FP8, error_tiles
from quantkit.numerics.grid import has_one_scale_per_group
from quantkit.numerics.scale_choice import ScaleChoice
from quantkit.numerics.search import CANDIDATES
from quantkit.numerics.simd import LANES

Packed = NDArray[np.int32]
Bits = NDArray[np.uint16]
Zeros = NDArray[np.int8]
Sums = NDArray[np.float64]

_NO_ZEROS = input_bytes(np.empty(0, np.int8), 0)


def _quantize(
    array_RC: NDArray[Any],
    kind: int,
    scale: NDArray[np.uint8],
    group_size: int,
    scales: ScaleChoice,
    signed: bool,
    importance_C: NDArray[np.uint16] | None,
) -> tuple[Packed, Bits]:
    num_rows, num_cols = array_RC.shape
    groups_per_row, num_groups, padded_groups = count_groups(array_RC, group_size)
    source = input_bytes(array_RC, LANES * group_size)
    packed = np.empty(padded_groups * group_size // 8, np.int32)
    int4_scale = np.empty(padded_groups, np.uint16)
    candidates = np.array(CANDIDATES[group_size] if scales == "search" else (), np.float32)
    if num_groups:
        importance = importance_bytes(importance_C, group_size)
        quantize_tiles(
            *(source, kind, scale, padded_groups, group_size, candidates, signed),
            *(importance, groups_per_row, scratch(), packed, int4_scale),
        )
    packed_RW = packed[: num_groups * group_size // 8].reshape(num_rows, num_cols // 8)
    return packed_RW, int4_scale[:num_groups].reshape(num_rows, groups_per_row)


def quantize_fp8(
    codes_RC: NDArray[np.uint8],
    scale_BB: NDArray[np.float32],
    *,
    block: tuple[int, int],
    row_offset: int = 0,
    group_size: int,
    scales: ScaleChoice,
    signed: bool,
    importance_C: NDArray[np.uint16] | None = None,
) -> tuple[Packed, Bits]:
    """Packed INT4 words and BF16 scales of FP8 codes without NaN; scales are finite, 0 only over zeros."""
    if not has_one_scale_per_group(block[1], group_size):
        values_RC = decode_fp8(codes_RC, scale_BB, block, row_offset, np.float32)
        return quantize_values(
            values_RC, group_size=group_size, scales=scales, signed=signed, importance_C=importance_C
        )
    scale = group_scales(codes_RC, scale_BB, block, row_offset, group_size)
    return _quantize(codes_RC, FP8, scale, group_size, scales, signed, importance_C)


def quantize_values(
    values_RC: Bits | NDArray[np.float32],
    *,
    group_size: int,
    scales: ScaleChoice,
    signed: bool,
    importance_C: NDArray[np.uint16] | None = None,
) -> tuple[Packed, Bits]:
    """Packed INT4 words and BF16 scales of finite BF16 (uint16) or float32 values."""
    return _quantize(values_RC, kind_of(values_RC), NO_SCALES, group_size, scales, signed, importance_C)


def dequantize_fp8(
    codes_RC: NDArray[np.uint8], scale_BB: NDArray[np.float32], *, block: tuple[int, int], row_offset: int = 0
) -> Bits:
    """BF16 of ``fp8.dequantize``, for codes without NaN."""
    return decode_fp8(codes_RC, scale_BB, block, row_offset, np.uint16)


def _error_rows(
    array_RC: NDArray[Any],
    kind: int,
    scale: NDArray[np.uint8],
    packed_RW: Packed,
    scale_RG: Bits,
    group_size: int,
    zero_RG: Zeros | None,
) -> tuple[Sums, Sums]:
    num_rows = len(array_RC)
    groups_per_row, num_groups, padded_groups = count_groups(array_RC, group_size)
    # padding belongs to rows that are cut off
    error2, reference2 = np.zeros((2, num_rows + LANES))
    if num_groups:
        source = input_bytes(array_RC, LANES * group_size)
        packed = input_bytes(packed_RW, LANES * group_size // 8)
        int4_scale = input_bytes(scale_RG, LANES)
        int4_zero = _NO_ZEROS if zero_RG is None else input_bytes(zero_RG, LANES)
        error_tiles(
            *(source, kind, scale, padded_groups, group_size, groups_per_row),
            *(packed, int4_scale, int4_zero, scratch(), error2, reference2),
        )
    return error2[:num_rows], reference2[:num_rows]


def error_rows_fp8(
    codes_RC: NDArray[np.uint8],
    scale_BB: NDArray[np.float32],
    packed_RW: Packed,
    scale_RG: Bits,
    *,
    block: tuple[int, int],
    row_offset: int = 0,
    group_size: int,
    zero_RG: Zeros | None = None,
) -> tuple[Sums, Sums]:
    """``metrics.error_rows`` against FP8 codes without NaN."""
    if not has_one_scale_per_group(block[1], group_size):
        values_RC = decode_fp8(codes_RC, scale_BB, block, row_offset, np.float32)
        return error_rows_values(values_RC, packed_RW, scale_RG, group_size=group_size, zero_RG=zero_RG)
    scale = group_scales(codes_RC, scale_BB, block, row_offset, group_size)
    return _error_rows(codes_RC, FP8, scale, packed_RW, scale_RG, group_size, zero_RG)


def error_rows_values(
    values_RC: Bits | NDArray[np.float32],
    packed_RW: Packed,
    scale_RG: Bits,
    *,
    group_size: int,
    zero_RG: Zeros | None = None,
) -> tuple[Sums, Sums]:
    """``metrics.error_rows`` against BF16 (uint16) or float32 values."""
    return _error_rows(values_RC, kind_of(values_RC), NO_SCALES, packed_RW, scale_RG, group_size, zero_RG)
