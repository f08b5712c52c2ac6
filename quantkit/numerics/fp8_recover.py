"""The FP8 blocks that BF16 weights were decoded from: codes and a scale which decode to the very same BF16.

A decoded block holds at most 253 different values, products of a code and one scale, rounded: who knows the code of the
largest knows all of them, and every value bounds the scale. The code of the largest is not known, only that, but for a
power of two, it is one of the seven from 256 to 448, or 240, twice of which is no code; each is tried, 448 first, since
quantizers scale to it. What comes out is compared bit for bit; nothing is ever rounded to fit.
Suffixes: ``R`` rows, ``C`` columns, ``B`` blocks.
"""

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics import bfloat16, fp8

BLOCK = 128
_TOPS = (448, 416, 384, 352, 320, 288, 256, 240)
_MAGNITUDES = fp8.decode_e4m3(np.arange(127, dtype=np.uint8)).astype(np.float64)
_MIDDLES = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2

Recovered = tuple[NDArray[np.uint8], NDArray[np.float32]]  # codes_RC, scale_BB


class NotFromFp8Error(ValueError):
    """No codes and scale decode to a block; ``block`` says which."""

    def __init__(self, block: tuple[int, int]) -> None:
        super().__init__(f"block {block}")
        self.block = block


def recover_fp8(bits_RC: NDArray[np.uint16]) -> Recovered:
    """E4M3 codes [R, C] and scales of blocks of 128 x 128, ragged ones too. Raises NotFromFp8Error."""
    num_rows, num_cols = bits_RC.shape
    grid = -(-num_rows // BLOCK), -(-num_cols // BLOCK)
    codes_RC = np.empty((num_rows, num_cols), np.uint8)
    scale_BB = np.empty(grid, np.float32)
    for row, col in np.ndindex(grid):
        place = np.s_[row * BLOCK : (row + 1) * BLOCK, col * BLOCK : (col + 1) * BLOCK]
        found = _recover_block(bits_RC[place])
        if found is None:
            raise NotFromFp8Error((row, col))
        codes_RC[place], scale_BB[row, col] = found
    return codes_RC, scale_BB


def _recover_block(bits: NDArray[np.uint16]) -> tuple[NDArray[np.uint8], np.float32] | None:
    """By its different magnitudes, which are few; a block of zeros has scale 1."""
    magnitude = bits & np.uint16(0x7FFF)
    magnitudes = np.flatnonzero(np.bincount(magnitude.reshape(-1))).astype(np.uint16)
    sign = (bits >> np.uint16(8)).astype(np.uint8) & np.uint8(0x80)
    if magnitudes[-1] == 0:
        return sign, np.float32(1)
    if len(magnitudes) > len(_MAGNITUDES) or magnitudes[-1] >= 0x7F80:
        return None
    for top in _TOPS:
        found = _with_top(magnitudes, top)
        if found is not None:
            codes, scale = found
            table = np.zeros(int(magnitudes[-1]) + 1, np.uint8)
            table[magnitudes] = codes
            return table[magnitude] | sign, scale
    return None


def _with_top(magnitudes: NDArray[np.uint16], top: int) -> tuple[NDArray[np.uint8], np.float32] | None:
    """Codes of ascending BF16 magnitudes of which the last has the code's value ``top``."""
    values = bfloat16.to_float32(magnitudes).astype(np.float64)
    codes = np.searchsorted(_MIDDLES, values / (values[-1] / top)).astype(np.uint8)
    is_zero = magnitudes == 0
    if ((codes == 0) != is_zero).any():
        return None
    known, factors = values[~is_zero], _MAGNITUDES[codes[~is_zero]]
    below, above = (bfloat16.to_float32(magnitudes[~is_zero] + np.uint16(step)) for step in (0xFFFF, 1))
    low, high = np.max((known + below) / 2 / factors), np.min((known + above) / 2 / factors)
    if low > high:
        return None
    for scale in _between(low, high):
        if np.array_equal(bfloat16.from_float32(fp8.decode_e4m3(codes) * scale), magnitudes):
            return codes, scale
    return None


def _between(low: float, high: float) -> tuple[np.float32, ...]:
    """The middle first; the ends, where rounding twice may have put the scale."""
    middle = np.float32((low + high) / 2)
    ends = np.float32(low), np.float32(high)
    return middle, *ends, *(np.nextafter(end, middle) for end in ends)
