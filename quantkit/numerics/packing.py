"""Eight INT4 codes in an int32 word, the lowest nibble first, each stored as code + 8.

Codes lie along a row, zero points along a column.
Suffixes: ``R`` rows, ``C`` columns, ``G`` groups, ``W`` words.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CODES_PER_WORD = 8


class Int4Words(NamedTuple):
    """Rows of an INT4 weight before any consumer's layout: ``packed`` int32 [R, W], ``scale`` [R, G] as it is stored.

    ``zero``: int8 [R, G], the code that stands for zero in each group; None where that is 0.
    """

    packed: NDArray[np.int32]
    scale: NDArray[Any]
    zero: NDArray[np.int8] | None = None

    def first(self, num_rows: int) -> "Int4Words":
        """Of the first few rows."""
        zero = None if self.zero is None else self.zero[:num_rows]
        return Int4Words(self.packed[:num_rows], self.scale[:num_rows], zero)


_SHIFT_8 = np.arange(0, 32, 4, dtype=np.uint32)


def pack_int4(codes_RC: NDArray[np.int8]) -> NDArray[np.int32]:
    """Nibble i of word w is element 8w + i; a last word that is not full ends in nibbles of 0."""
    num_rows, num_cols = codes_RC.shape
    num_words = -(-num_cols // 8)
    nibbles = np.zeros((num_rows, num_words * 8), np.uint32)
    nibbles[:, :num_cols] = codes_RC.astype(np.int32) + 8
    shifted = nibbles.reshape(num_rows, num_words, 8) << _SHIFT_8
    words_RW: NDArray[np.uint32] = np.bitwise_or.reduce(shifted, axis=-1)
    return words_RW.view(np.int32)


def unpack_int4(packed_RW: NDArray[np.int32], num_cols: int) -> NDArray[np.int8]:
    """The first ``num_cols`` codes of each row."""
    num_rows, num_words = packed_RW.shape
    assert num_words == -(-num_cols // 8), (num_words, num_cols)
    nibbles = (np.ascontiguousarray(packed_RW).view(np.uint32)[..., None] >> _SHIFT_8) & np.uint32(15)
    return (nibbles.astype(np.int8) - np.int8(8)).reshape(num_rows, num_words * 8)[:, :num_cols]


def pack_rows_int4(zero_RG: NDArray[np.int8]) -> NDArray[np.int32]:
    """Nibble i of word w is row 8w + i; a last word that is not full ends in nibbles of 0."""
    return np.ascontiguousarray(pack_int4(np.ascontiguousarray(zero_RG.T)).T)


def unpack_rows_int4(packed_WG: NDArray[np.int32], num_rows: int) -> NDArray[np.int8]:
    """The first ``num_rows`` rows."""
    return np.ascontiguousarray(unpack_int4(np.ascontiguousarray(packed_WG.T), num_rows).T)
