"""Arrays as the numba kernels take them: bytes that are read, filled up to a tile; scratch memory; rows decoded.

Suffixes: ``R`` rows, ``C`` columns, ``B`` blocks.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.fp8 import expand_blocks
from quantkit.numerics.fused_values import BF16, F32, dequantize_rows
from quantkit.numerics.search import CANDIDATES
from quantkit.numerics.simd import LANES

_MAX_GROUP = max(CANDIDATES)


def _aligned(num_items: int, dtype: type) -> NDArray[Any]:
    """Uninitialised items that start at a cache line."""
    raw = np.empty(num_items * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_items * np.dtype(dtype).itemsize].view(dtype)


def scratch() -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Integers or values, weights, and moments of a tile."""
    num_items = _MAX_GROUP * LANES
    return _aligned(num_items, np.float32), _aligned(num_items, np.float32), _aligned(num_items, np.float64)


def input_bytes(array: NDArray[Any], num_items: int) -> NDArray[np.uint8]:
    """The bytes of at least ``num_items``, filled up with zeros.

    Always read-only bytes, so that memory maps, of any alignment, do not compile a kernel of their own.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    if len(flat) < num_items:
        flat = np.concatenate([flat, np.zeros(num_items - len(flat), flat.dtype)])
    raw = flat.view(np.uint8)
    raw.flags.writeable = False
    return raw


def kind_of(values: NDArray[Any]) -> int:
    return {np.dtype(np.uint16): BF16, np.dtype(np.float32): F32}[values.dtype]


class Groups(NamedTuple):
    """How many groups a matrix has; ``padded``: at least as many as there are lanes."""

    per_row: int
    total: int
    padded: int


def count_groups(array_RC: NDArray[Any], group_size: int) -> Groups:
    """Of a matrix whose columns are whole groups, of a size that kernels know."""
    num_rows, num_cols = array_RC.shape
    assert group_size in CANDIDATES, group_size
    assert num_cols % group_size == 0, (num_cols, group_size)
    per_row = num_cols // group_size
    return Groups(per_row, num_rows * per_row, max(num_rows * per_row, LANES))


def group_scales(
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
    return input_bytes(scale_RG, LANES)


NO_SCALES = input_bytes(np.zeros(LANES, np.float32), LANES)
_NO_IMPORTANCE = input_bytes(np.empty(0, np.uint8), 0)


def importance_bytes(importance_C: NDArray[np.uint16] | None, group_size: int) -> NDArray[np.uint8]:
    """Of a row, and of the row that follows as far as a tile can reach into it; nothing where nothing is known."""
    if importance_C is None:
        return _NO_IMPORTANCE
    count = len(importance_C) + (LANES - 1) * group_size
    return input_bytes(np.resize(importance_C, count), count)


def decode_fp8(
    codes_RC: NDArray[np.uint8],
    scale_BB: NDArray[np.float32],
    block: tuple[int, int],
    row_offset: int,
    dtype: type,
) -> NDArray[Any]:
    """Rows as float32, or as the bits of BF16 for uint16."""
    num_rows, num_cols = codes_RC.shape
    total = num_rows * num_cols
    codes = input_bytes(codes_RC, LANES)
    # for the loads of 16 that would read past the end
    last_codes = input_bytes(codes[max(0, total - LANES) :], 2 * LANES)
    out = np.empty(total + LANES, dtype)
    is_bf16 = dtype is np.uint16
    scale = np.array(scale_BB, np.float32, order="C")
    dequantize_rows(codes, last_codes, scale, *block, row_offset, num_rows, num_cols, is_bf16, out)
    return out[:total].reshape(num_rows, num_cols)
