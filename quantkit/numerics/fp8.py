"""Decoding FP8: E4M3 codes times a scale per block.

Suffixes: ``R`` rows (out), ``C`` columns (in), ``B`` blocks along rows and columns. E4M3 is the ``fn``
kind in files: no infinities, codes 0x7F and 0xFF are NaN. E8M0 is a bare power of two.
"""

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]
Float32 = NDArray[np.float32]

E4M3_UNIT = 2.0**-9
"""The value of one step of ``E4M3_INTS``: the smallest subnormal."""

E4M3_MAX = 448.0
E4M3_MIN_EXPONENT = -6  # of the normal numbers

_SCAN_BYTES = 1 << 16  # stays in the second-level cache


def _e4m3_ints() -> NDArray[np.int32]:
    magnitude = np.arange(128)
    exponent, mantissa = magnitude >> 3, magnitude & 7
    ints = np.where(exponent == 0, mantissa, (8 + mantissa) << np.maximum(exponent - 1, 0))
    ints[127] = 0
    return np.concatenate([ints, -ints]).astype(np.int32)


E4M3_INTS = _e4m3_ints()
"""The value of each code times 2**9, at most 229,376; the two NaN codes give 0."""
E4M3_INTS.flags.writeable = False

_E4M3_VALUES = (E4M3_INTS * E4M3_UNIT).astype(np.float32)
_E4M3_VALUES[0x80] = -0.0
_E4M3_VALUES[[0x7F, 0xFF]] = np.nan


def first_nan(codes_RC: Codes) -> tuple[int, int] | None:
    """Row and column of the first NaN code, in row order."""
    num_rows, num_cols = codes_RC.shape
    step = max(1, _SCAN_BYTES // max(1, num_cols))
    for start in range(0, num_rows, step):
        is_nan = (codes_RC[start : start + step] & np.uint8(0x7F)) == np.uint8(0x7F)
        if is_nan.any():
            row, col = divmod(int(is_nan.argmax()), num_cols)
            return start + row, col
    return None


def decode_e4m3(codes: Codes) -> Float32:
    """The exact value of each code; NaN for the two NaN codes."""
    return _E4M3_VALUES[codes]


def round_e4m3(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest E4M3 value, ties to even; beyond 448 it is 448."""
    _, exponent = np.frexp(values)
    # four bits of significand; below 2**-6 the step stays that of the subnormals
    step_exponent = np.maximum(exponent - 1, E4M3_MIN_EXPONENT) - 3
    rounded = np.ldexp(np.rint(np.ldexp(values, -step_exponent)), step_exponent)
    clipped: NDArray[np.float64] = np.clip(rounded, -E4M3_MAX, E4M3_MAX)
    return clipped


def decode_e8m0(exponents: NDArray[np.uint8]) -> Float32:
    """``2 ** (byte - 127)``, exactly (byte 0 is a float32 subnormal); byte 255 is NaN."""
    word = exponents.astype(np.uint32) << np.uint32(23)
    scale = np.where(exponents == 0, np.uint32(1 << 22), word).view(np.float32)
    return np.where(exponents == 255, np.float32(np.nan), scale)


def expand_blocks(scale_BB: Float32, *, rows: int, cols: int, block: tuple[int, int], row_offset: int = 0) -> Float32:
    """The scale of every element; row 0 of the result is row ``row_offset`` of the block grid.

    ``block`` is (rows, columns): (1, C) is a scale per output channel, (R, C) per tensor, (1, 32) is MXFP8.
    Blocks at the ragged edges are cut.
    """
    block_rows = (row_offset + np.arange(rows)) // block[0]
    block_cols = np.arange(cols) // block[1]
    return scale_BB[block_rows[:, None], block_cols]


def dequantize(codes_RC: Codes, scale_BB: Float32, *, block: tuple[int, int], row_offset: int = 0) -> Float32:
    """``decode_e4m3(code) * scale``: one float32 multiplication, which may overflow to infinity."""
    num_rows, num_cols = codes_RC.shape
    scale_RC = expand_blocks(scale_BB, rows=num_rows, cols=num_cols, block=block, row_offset=row_offset)
    with np.errstate(over="ignore", invalid="ignore"):
        return decode_e4m3(codes_RC) * scale_RC
