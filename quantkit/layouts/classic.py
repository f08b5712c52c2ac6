"""AutoGPTQ's and AutoAWQ's INT4, which is read and never written: matrices lie [in, out].

A weight [R, C] in groups along C has ``qweight``, ``scales`` [G, R] and ``qzeros`` int32 [G, R/8], unsigned nibbles u
with ``w = (u - z) * scale``. GPTQ packs eight columns in a word (``qweight`` [C/8, R]), AWQ eight rows, interleaved
(``qweight`` [C, R/8]). An unsigned nibble is what compressed-tensors stores for code + 8, so GPTQ's words need only be
turned round. Source: AutoGPTQ, AutoAWQ (`gemm`) and their readers in SGLang 0.5.23 and vLLM 0.33.0.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.packing import CODES_PER_WORD, pack_int4, unpack_int4

QWEIGHT = "qweight"
_BAND = 32  # columns
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of a word in which row 0, 1, ... of its eight lies


class ZeroPointError(ValueError):
    """A zero point that may stand for two numbers."""


def gptq_words(qweight: NDArray[Any]) -> NDArray[np.int32]:
    """Words [R, C/8] of codes."""
    return np.ascontiguousarray(qweight.T)


def gptq_zeros(qzeros: NDArray[Any], num_rows: int, *, offset: int) -> NDArray[np.int8]:
    """Zero points [R, G] as codes. ``offset``: 1 where they are stored less one; then 15 could be 0 or 16."""
    zero_GR = unpack_int4(qzeros, num_rows).astype(np.int16) + offset
    if (zero_GR > 7).any():
        raise ZeroPointError("a stored zero point of 15 may stand for 0 or for 16")
    return np.ascontiguousarray(zero_GR.T.astype(np.int8))


def awq_words(qweight: NDArray[Any], num_rows: int) -> NDArray[np.int32]:
    """Words [R, C/8] of codes. By bands of columns: a code takes eight times its stored bytes while it is unpacked."""
    num_cols = len(qweight)
    words = np.empty((num_rows, num_cols // CODES_PER_WORD), np.int32)
    for first in range(0, num_cols, _BAND):
        codes = _awq_codes(qweight[first : first + _BAND], num_rows)
        place = slice(first // CODES_PER_WORD, (first + len(codes)) // CODES_PER_WORD)
        words[:, place] = pack_int4(np.ascontiguousarray(codes.T))
    return words


def awq_zeros(qzeros: NDArray[Any], num_rows: int) -> NDArray[np.int8]:
    """Zero points [R, G] as codes."""
    return np.ascontiguousarray(_awq_codes(qzeros, num_rows).T)


def _awq_codes(words: NDArray[Any], num_rows: int) -> NDArray[np.int8]:
    """[X, R] of words [X, R/8]."""
    codes = unpack_int4(words, num_rows)
    return codes.reshape(len(codes), -1, 8)[:, :, _AWQ_ORDER].reshape(codes.shape)
