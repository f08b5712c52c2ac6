import json
from pathlib import Path

import numpy as np
import pytest
import torch

from quantkit.numerics import fp8

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
ALL_CODES = np.arange(256, dtype=np.uint8)


def test_ints_are_the_literal_table():
    positive = GOLDEN["e4m3_ints"]
    assert len(positive) == 128
    assert fp8.E4M3_INTS.dtype == np.int32
    assert fp8.E4M3_INTS.tolist() == positive + [-value for value in positive]


def test_all_codes_decode_as_torch_decodes_them(assert_same_bytes):
    expected = torch.from_numpy(ALL_CODES).view(torch.float8_e4m3fn).float().numpy()
    got = fp8.decode_e4m3(ALL_CODES)
    assert np.isnan(got).nonzero()[0].tolist() == [0x7F, 0xFF]
    finite = ~np.isnan(got)
    assert_same_bytes("values", expected[finite], got[finite])
    np.testing.assert_array_equal(fp8.E4M3_INTS[finite] * 2.0**-9, expected[finite])


def test_all_exponents_decode_as_torch_decodes_them(assert_same_bytes):
    expected = torch.from_numpy(ALL_CODES).view(torch.float8_e8m0fnu).float().numpy()
    got = fp8.decode_e8m0(ALL_CODES)
    assert_same_bytes("scales", expected[:255], got[:255])
    assert got[0] == np.float32(2.0**-127)
    assert np.isnan(got[255])


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("shape", [(1, 7), (300, 640), (3, 200_000)])
def test_first_nan_names_the_first_position(code, shape):
    codes = np.full(shape, 0x7E, np.uint8)
    assert fp8.first_nan(codes) is None
    codes[-1, -1] = codes[-1, -2] = code
    assert fp8.first_nan(codes) == (shape[0] - 1, shape[1] - 2)
    codes[0, 3] = code
    assert fp8.first_nan(codes) == (0, 3)


def test_first_nan_of_nothing_is_none():
    assert fp8.first_nan(np.zeros((0, 5), np.uint8)) is None
    assert fp8.first_nan(np.zeros((5, 0), np.uint8)) is None


def test_blocks_expand_and_are_cut_at_ragged_edges(random_fp8):
    _, scale = random_fp8(576, 300, (128, 128))
    expected = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:576, :300]
    np.testing.assert_array_equal(fp8.expand_blocks(scale, rows=576, cols=300, block=(128, 128)), expected)
    part = fp8.expand_blocks(scale, rows=200, cols=300, block=(128, 128), row_offset=100)
    np.testing.assert_array_equal(part, expected[100:300])


@pytest.mark.parametrize("block", [(1, 96), (40, 96), (1, 32), (16, 5)])
def test_every_granularity_is_a_block(block, random_fp8):
    codes, scale = random_fp8(40, 96, block)
    got = fp8.dequantize(codes, scale, block=block)
    for row, col in ((0, 0), (39, 95), (17, 64), (16, 4)):
        assert got[row, col] == fp8.decode_e4m3(codes)[row, col] * scale[row // block[0], col // block[1]]
    assert got.dtype == np.float32
