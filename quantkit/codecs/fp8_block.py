"""FP8 (E4M3) with one multiplier per block of rows and columns.

One codec for three published forms: a scale per output channel is a block of one row, a scale per tensor a block of
the whole matrix, MXFP8 a block of 1 x 32. The multiplier is called ``weight_scale_inv``, ``weight_scale`` or
``scale`` on disk; whatever the name says, it multiplies. Parts: ``codes`` uint8 [R, C], ``scale`` float32 [blocks].
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.codecs.codec import Array, Parts
from quantkit.numerics import bfloat16, fp8
from quantkit.tensors import BF16, F8_E8M0, F16, F32, U8, DType

_LARGEST_SCALE = np.float32(2.0**127 / 448)  # above it a decoded weight may overflow BF16


def is_no_scale(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Where a multiplier is negative, NaN, Inf or huge."""
    wrong: NDArray[np.bool_] = ~((values >= 0) & (values <= _LARGEST_SCALE))
    return wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Block:
    """``row_offset``: row 0 of the weight is this row of the block grid (the second half of a fused tensor)."""

    block_rows: int
    block_cols: int
    row_offset: int = 0

    @property
    def name(self) -> str:
        return "fp8_block"

    @property
    def block(self) -> tuple[int, int]:
        return self.block_rows, self.block_cols

    def grid_shape(self, num_rows: int, num_cols: int) -> tuple[int, int]:
        """Rows and columns of the scale grid: ragged edges have a block of their own."""
        return -(-(self.row_offset + num_rows) // self.block_rows), -(-num_cols // self.block_cols)

    def problem(self, parts: Parts, first_row: int) -> str | None:
        """NaN codes; scales that are negative, NaN, Inf or huge; zero over codes that are not zero."""
        codes_RC, scale_BB = parts["codes"], parts["scale"]
        bad = fp8.first_nan(codes_RC)
        if bad is not None:
            return f"holds a NaN (code 0x{codes_RC[bad]:02X}) at row {first_row + bad[0]}, column {bad[1]}"
        wrong_BB = is_no_scale(scale_BB)
        if wrong_BB.any():
            row, column = np.argwhere(wrong_BB)[0]
            value = scale_BB[row, column]
            return f"its scale at block ({row}, {column}) is {value}; it must be finite and positive"
        return None if scale_BB.all() else self._zero_block_problem(codes_RC, scale_BB, first_row)

    def _zero_block_problem(self, codes_RC: Array, scale_BB: NDArray[np.float32], first_row: int) -> str | None:
        """A block of zeros may have scale 0; anything else would be lost."""
        rows, cols = codes_RC.shape
        scale_RC = fp8.expand_blocks(
            scale_BB, rows=rows, cols=cols, block=self.block, row_offset=self.row_offset + first_row
        )
        lost_RC = (scale_RC == 0) & (codes_RC & 0x7F != 0)
        if not lost_RC.any():
            return None
        row, column = np.argwhere(lost_RC)[0]
        return f"has scale 0 over code 0x{codes_RC[row, column]:02X} at row {first_row + row}, column {column}"

    def decode(self, parts: Parts, first_row: int) -> NDArray[np.float32]:
        """float32 product of code and scale."""
        row_offset = self.row_offset + first_row
        return fp8.dequantize(parts["codes"], parts["scale"], block=self.block, row_offset=row_offset)


def scale_values(stored: Array, dtype: DType, grid_shape: tuple[int, int]) -> NDArray[np.float32]:
    """A stored scale of any dtype as float32 in the shape of the block grid; E8M0 may be stored as uint8."""
    if dtype in (F8_E8M0, U8):
        values = fp8.decode_e8m0(stored)
    elif dtype == BF16:
        values = bfloat16.to_float32(stored)
    else:
        assert dtype in (F16, F32), dtype
        values = stored.astype(np.float32)
    return np.ascontiguousarray(values.reshape(grid_shape))
