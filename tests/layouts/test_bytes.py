"""Bytes of every layout, written out: the values are those that the engines' own packing gives."""

import tracemalloc

import numpy as np
import pytest

from quantkit.layouts import LAYOUTS, classic
from quantkit.numerics.packing import Int4Words, pack_int4, pack_rows_int4, unpack_int4, unpack_rows_int4

ALL_CODES = np.arange(-8, 8, dtype=np.int8)[None]
SCALE = np.full((1, 1), 0x3F80, np.uint16)


@pytest.mark.parametrize(
    ("layout", "stored"),
    [("compressed-tensors", "1032547698badcfe"), ("w4afp8", "98badcfe10325476")],
)
def test_all_codes_in_order(layout, stored):
    words = Int4Words(pack_int4(ALL_CODES), SCALE)
    parts = LAYOUTS[layout].from_words(words)
    assert parts["packed"].tobytes().hex() == stored
    back = LAYOUTS[layout].to_words(parts)
    assert (unpack_int4(back.packed, 16) == ALL_CODES).all()
    assert back.scale is SCALE


def test_w4afp8_is_two_signed_nibbles_a_byte_the_even_column_lower():
    random = np.random.default_rng(0)
    codes = random.integers(-8, 8, (6, 256)).astype(np.int8)
    packed = LAYOUTS["w4afp8"].from_words(Int4Words(pack_int4(codes), np.zeros((6, 2), np.uint16)))["packed"]
    assert packed.dtype == np.int8
    assert packed.shape == (6, 128)
    low, high = (packed << 4).astype(np.int8) >> 4, packed >> 4
    assert (low == codes[:, ::2]).all()
    assert (high == codes[:, 1::2]).all()


def test_zero_points_are_packed_down_the_rows():
    zero = np.arange(-8, 8, dtype=np.int8)[:, None]
    packed = pack_rows_int4(zero)
    assert packed.view(np.uint32).tolist() == [[0x76543210], [0xFEDCBA98]]
    assert (unpack_rows_int4(packed, 16) == zero).all()


def test_gptq_words_hold_eight_columns_of_a_row():
    """Column c of row r is c + r, of 8 columns and 2 rows: one word of each row, side by side."""
    qweight = np.array([[0x76543210, 0x87654321 - 2**32]], np.int64).astype(np.int32)
    codes = unpack_int4(classic.gptq_words(qweight), 8)
    assert (codes + 8).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8]]


def test_awq_words_hold_eight_rows_of_a_column_interleaved():
    """Rows 0 to 7 of one column hold 0 to 7: nibbles are rows 0, 2, 4, 6, 1, 3, 5, 7."""
    qweight = np.array([[0x75316420]] * 8, np.int32)
    codes = unpack_int4(classic.awq_words(qweight, 8), 8)
    assert (codes + 8).T.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]] * 8


@pytest.mark.parametrize(("offset", "stored", "zero"), [(1, 7, 0), (0, 8, 0), (1, 0, -7), (0, 0, -8), (1, 14, 7)])
def test_gptq_zero_points_of_both_formats(offset, stored, zero):
    qzeros = np.array([[stored * 0x11111111]], np.int64).astype(np.uint32).view(np.int32)
    assert (classic.gptq_zeros(qzeros[:, :1], 8, less=offset) == zero).all()


def test_a_stored_zero_point_of_15_less_one_is_refused():
    qzeros = np.array([[-1]], np.int32)
    with pytest.raises(classic.ZeroPointError, match="0 or for 16"):
        classic.gptq_zeros(qzeros, 8, less=1)
    assert (classic.gptq_zeros(qzeros, 8, less=0) == 7).all()


def test_a_wide_matrix_of_awq_takes_little_more_than_its_words():
    """Unpacked at once it would be eight times as much, and more on the way."""
    qweight = np.zeros((2048, 4096 // 8), np.int32)
    tracemalloc.start()
    try:
        words = classic.awq_words(qweight, 4096)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * words.nbytes
