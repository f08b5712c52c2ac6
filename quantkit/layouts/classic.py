"""AutoGPTQ's and AutoAWQ's INT4, which is read and never written: matrices lie [in, out].

A weight [R, C] in groups along C has ``qweight``, ``scales`` [G, R] and ``qzeros`` int32 [G, R/8], unsigned nibbles u
with ``w = (u - z) * scale``. GPTQ packs eight columns in a word (``qweight`` [C/8, R]), AWQ eight rows, interleaved
(``qweight`` [C, R/8]). An unsigned nibble is what compressed-tensors stores for code + 8, so GPTQ's words need only be
turned round. Source: AutoGPTQ, AutoAWQ (`gemm`) and their readers in SGLang 0.5.23 and vLLM 0.33.0.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.layouts.layout import READERS, Stored
from quantkit.numerics.packing import CODES_PER_WORD, Int4Words, pack_int4, unpack_int4

QWEIGHT, SCALES, QZEROS, G_IDX = "qweight", "scales", "qzeros", "g_idx"
_BAND = 32  # columns
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of a word in which row 0, 1, ... of its eight lies


class ZeroPointError(ValueError):
    """A zero point that may stand for two numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq:
    """``less``: what a stored zero point is less than it is."""

    name: str
    less: int
    has_row_blocks: bool = False

    def weight_shape(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of a weight whose ``qweight`` is [height, width]."""
        return width, height * CODES_PER_WORD

    def to_words(self, stored: Stored) -> Int4Words:
        """Raises ZeroPointError."""
        num_rows, zeros = stored["packed"].shape[1], stored.get("zero")
        zero_RG = None if zeros is None else gptq_zeros(zeros, num_rows, less=self.less)
        return Int4Words(gptq_words(stored["packed"]), np.ascontiguousarray(stored["scale"].T), zero_RG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq:
    """AutoAWQ's `gemm`."""

    name: str = "awq"
    has_row_blocks: bool = False

    def weight_shape(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of a weight whose ``qweight`` is [height, width]."""
        return width * CODES_PER_WORD, height

    def to_words(self, stored: Stored) -> Int4Words:
        """Turned round, by bands."""
        num_rows, zeros = stored["packed"].shape[1] * CODES_PER_WORD, stored.get("zero")
        zero_RG = None if zeros is None else awq_zeros(zeros, num_rows)
        return Int4Words(awq_words(stored["packed"], num_rows), np.ascontiguousarray(stored["scale"].T), zero_RG)


def gptq_words(qweight: NDArray[Any]) -> NDArray[np.int32]:
    """Words [R, C/8] of codes."""
    return np.ascontiguousarray(qweight.T)


def gptq_zeros(qzeros: NDArray[Any], num_rows: int, *, less: int) -> NDArray[np.int8]:
    """Zero points [R, G] as codes. Where they are stored ``less`` one, 15 could be 0 or 16."""
    zero_GR = unpack_int4(qzeros, num_rows).astype(np.int16) + less
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


CLASSIC: dict[str, Gptq | Awq] = {
    one.name: one for one in (Gptq(name="gptq", less=1), Gptq(name="gptq_v2", less=0), Awq())
}
for _reader in CLASSIC.values():
    READERS.add(_reader.name, _reader)
