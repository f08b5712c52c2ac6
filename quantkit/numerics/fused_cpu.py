"""The numba twin of the conversion path: decode, search, quantize, pack in one pass, same bytes as numpy.

Suffixes: ``R`` rows, ``C`` columns, ``G`` groups along C, ``B`` blocks, ``W`` packed words.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.fp8 import expand_blocks
from quantkit.numerics.fused_tiles import quantize_tiles
from quantkit.numerics.fused_values import BF16, F32, FP8, dequantize_rows, error_tiles
from quantkit.numerics.grid import has_one_scale_per_group
from quantkit.numerics.scale_choice import ScaleChoice
from quantkit.numerics.search import CANDIDATES
from quantkit.numerics.simd import LANES

Packed = NDArray[np.int32]
Bits = NDArray[np.uint16]
Sums = NDArray[np.float64]

_MAX_GROUP = max(CANDIDATES)


def _aligned(num_items: int, dtype: type) -> NDArray[Any]:
    """Uninitialised items that start at a cache line."""
    raw = np.empty(num_items * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_items * np.dtype(dtype).itemsize].view(dtype)


def _scratch() -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Integers or values, weights, and moments of a tile."""
    num_items = _MAX_GROUP * LANES
    return _aligned(num_items, np.float32), _aligned(num_items, np.float32), _aligned(num_items, np.float64)


def _input(array: NDArray[Any], num_items: int) -> NDArray[np.uint8]:
    """The bytes of at least ``num_items``, filled up with zeros.

    Always read-only bytes, so that memory maps, of any alignment, do not compile a kernel of their own.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    if len(flat) < num_items:
        flat = np.concatenate([flat, np.zeros(num_items - len(flat), flat.dtype)])
    raw = flat.view(np.uint8)
    raw.flags.writeable = False
    return raw


def _kind(values: NDArray[Any]) -> int:
    return {np.dtype(np.uint16): BF16, np.dtype(np.float32): F32}[values.dtype]


def _group_scales(
    codes_RC: NDArray[np.uint8],
    scale_BB: NDArray[np.float32],
    block: tuple[int, int],
    row_offset: int,
    group_size: int,
) -> NDArray[np.uint8]:
    num_rows, num_cols = codes_RC.shape
    scale_RG = expand_blocks(
        scale_BB,
        rows=num_rows,
        cols=num_cols // group_size,
        block=(block[0], block[1] // group_size),
        row_offset=row_offset,
    )
    return _input(scale_RG, LANES)


_NO_SCALES = _input(np.zeros(LANES, np.float32), LANES)
_NO_IMPORTANCE = _input(np.empty(0, np.uint8), 0)


def _importance(importance_C: NDArray[np.uint16] | None, group_size: int) -> NDArray[np.uint8]:
    """Of a row, and of the row that follows as far as a tile can reach into it; nothing where nothing is known."""
    if importance_C is None:
        return _NO_IMPORTANCE
    count = len(importance_C) + (LANES - 1) * group_size
    return _input(np.resize(importance_C, count), count)


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
    assert group_size in CANDIDATES, group_size
    assert num_cols % group_size == 0, (num_cols, group_size)
    source = _input(array_RC, LANES * group_size)
    num_groups = num_rows * num_cols // group_size
    padded_groups = max(num_groups, LANES)
    packed = np.empty(padded_groups * group_size // 8, np.int32)
    int4_scale = np.empty(padded_groups, np.uint16)
    candidates = np.array(CANDIDATES[group_size] if scales == "search" else (), np.float32)
    if num_groups:
        importance = _importance(importance_C, group_size)
        quantize_tiles(
            *(source, kind, scale, padded_groups, group_size, candidates, signed),
            *(importance, num_cols // group_size, _scratch(), packed, int4_scale),
        )
    packed_RW = packed[: num_groups * group_size // 8].reshape(num_rows, num_cols // 8)
    return packed_RW, int4_scale[:num_groups].reshape(num_rows, num_cols // group_size)


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
        values_RC = _dequantize(codes_RC, scale_BB, block, row_offset, np.float32)
        return quantize_values(
            values_RC, group_size=group_size, scales=scales, signed=signed, importance_C=importance_C
        )
    scale = _group_scales(codes_RC, scale_BB, block, row_offset, group_size)
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
    return _quantize(values_RC, _kind(values_RC), _NO_SCALES, group_size, scales, signed, importance_C)


def _dequantize(
    codes_RC: NDArray[np.uint8],
    scale_BB: NDArray[np.float32],
    block: tuple[int, int],
    row_offset: int,
    dtype: type,
) -> NDArray[Any]:
    num_rows, num_cols = codes_RC.shape
    total = num_rows * num_cols
    codes = _input(codes_RC, LANES)
    # for the loads of 16 that would read past the end
    last_codes = _input(codes[max(0, total - LANES) :], 2 * LANES)
    out = np.empty(total + LANES, dtype)
    is_bf16 = dtype is np.uint16
    scale = np.array(scale_BB, np.float32, order="C")
    dequantize_rows(codes, last_codes, scale, *block, row_offset, num_rows, num_cols, is_bf16, out)
    return out[:total].reshape(num_rows, num_cols)


def dequantize_fp8(
    codes_RC: NDArray[np.uint8], scale_BB: NDArray[np.float32], *, block: tuple[int, int], row_offset: int = 0
) -> Bits:
    """BF16 of ``fp8.dequantize``, for codes without NaN."""
    return _dequantize(codes_RC, scale_BB, block, row_offset, np.uint16)


def _error_rows(
    array_RC: NDArray[Any],
    kind: int,
    scale: NDArray[np.uint8],
    packed_RW: Packed,
    scale_RG: Bits,
    group_size: int,
) -> tuple[Sums, Sums]:
    num_rows, num_cols = array_RC.shape
    assert group_size in CANDIDATES, group_size
    assert num_cols % group_size == 0, (num_cols, group_size)
    groups_per_row = num_cols // group_size
    num_groups = num_rows * groups_per_row
    padded_groups = max(num_groups, LANES)
    # padding belongs to rows that are cut off
    error2, reference2 = np.zeros((2, num_rows + LANES))
    if num_groups:
        source = _input(array_RC, LANES * group_size)
        packed = _input(packed_RW, LANES * group_size // 8)
        int4_scale = _input(scale_RG, LANES)
        error_tiles(
            *(source, kind, scale, padded_groups, group_size, groups_per_row),
            *(packed, int4_scale, _scratch(), error2, reference2),
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
) -> tuple[Sums, Sums]:
    """``metrics.error_rows`` against FP8 codes without NaN."""
    if not has_one_scale_per_group(block[1], group_size):
        values_RC = _dequantize(codes_RC, scale_BB, block, row_offset, np.float32)
        return error_rows_values(values_RC, packed_RW, scale_RG, group_size=group_size)
    scale = _group_scales(codes_RC, scale_BB, block, row_offset, group_size)
    return _error_rows(codes_RC, FP8, scale, packed_RW, scale_RG, group_size)


def error_rows_values(
    values_RC: Bits | NDArray[np.float32], packed_RW: Packed, scale_RG: Bits, *, group_size: int
) -> tuple[Sums, Sums]:
    """``metrics.error_rows`` against BF16 (uint16) or float32 values."""
    return _error_rows(values_RC, _kind(values_RC), _NO_SCALES, packed_RW, scale_RG, group_size)
