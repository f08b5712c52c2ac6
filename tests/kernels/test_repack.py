"""The kernels' order of INT4 words: where each code lies, and that nothing is lost."""

import pytest
import torch

from quantkit_kernels.word_order import Int4Weight, repack, unrepack
from tests.kernels.int4_weights import random_int4

pytestmark = pytest.mark.gpu


def code(words, row, col):
    return (int(words[row, col // 8]) >> (4 * (col % 8))) & 15


def test_each_code_lies_where_the_docstring_says(device):
    packed, scale = random_int4((3, 256), 32, device)
    tiles = repack(packed, scale, group_size=32)
    for row in range(3):
        for col in range(256):
            tile, in_tile = divmod(col, 128)
            p, rest = divmod(in_tile, 32)
            i, rest = divmod(rest, 8)
            t, b = divmod(rest, 2)
            word = int(tiles.words[tile, row, 4 * t + p])
            assert (word >> (4 * i + 16 * b)) & 15 == code(packed, row, col), (row, col)


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("shape", [(1, 128), (5, 384), (7, 6144), (2, 3, 256), (2, 2, 5, 128)])
def test_the_inverse_gives_the_checkpoint_back(shape, group_size, device):
    packed, scale = random_int4(shape, group_size, device)
    tiles = repack(packed, scale, group_size=group_size)
    assert tiles.words.shape == (*shape[:-2], shape[-1] // 128, shape[-2], 16)
    assert tiles.scale.shape == (*shape[:-2], shape[-1] // 128, shape[-2], 128 // group_size)
    got = unrepack(tiles, num_cols=shape[-1], group_size=group_size)
    assert torch.equal(got[0], packed)
    assert torch.equal(got[1].view(torch.int16), scale.view(torch.int16))


@pytest.mark.parametrize("num_cols", [32, 64, 96, 160])
def test_columns_that_fill_no_tile_are_zeros(num_cols, device):
    packed, scale = random_int4((4, num_cols), 32, device)
    tiles = repack(packed, scale, group_size=32)
    got = unrepack(tiles, num_cols=num_cols, group_size=32)
    assert torch.equal(got[0], packed)
    assert torch.equal(got[1], scale)
    whole, scales = unrepack(tiles, num_cols=tiles.words.shape[0] * 128, group_size=32)
    assert (whole[:, num_cols // 8 :] == -0x77777778).all()
    assert (scales[:, num_cols // 32 :] == 0).all()


def test_words_are_those_written_here(device):
    """Codes 0 to 15, again and again: the first word of a tile has columns 0, 1, 8, 9, 16, 17, 24, 25."""
    packed = torch.tensor([[0x76543210, 0xFEDCBA98 - 2**32] * 8], dtype=torch.int32, device=device)
    tiles = repack(packed, torch.ones((1, 1), dtype=torch.bfloat16, device=device), group_size=128)
    low, high = (0x0, 0x8, 0x0, 0x8), (0x1, 0x9, 0x1, 0x9)
    word = sum(one << (4 * i) for i, one in enumerate(low)) + sum(one << (16 + 4 * i) for i, one in enumerate(high))
    assert int(tiles.words[0, 0, 0]) & 0xFFFFFFFF == word == 0x91918080


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group_size": 16}, "not one of"),
        ({"weight_packed": torch.zeros(4, 16)}, "words are int32"),
        ({"weight_scale": torch.zeros(4, 4)}, "scales BF16"),
        ({"weight_scale": torch.zeros((4, 3), dtype=torch.bfloat16)}, r"has words \(4, 16\) and scales \(4, 4\), not"),
        ({"weight_packed": torch.zeros((4, 3), dtype=torch.int32)}, "24 columns has no whole groups of 32"),
    ],
)
def test_what_does_not_go_together_is_named(change, words):
    arguments = {
        "weight_packed": torch.zeros((4, 16), dtype=torch.int32),
        "weight_scale": torch.zeros((4, 4), dtype=torch.bfloat16),
        "group_size": 32,
    }
    with pytest.raises(ValueError, match=words):
        repack(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_cols": 384}, r"of 384|\(3, 4, 16\)"),
        ({"num_cols": 128}, r"\(1, 4, 16\)"),
        ({"num_cols": -32}, "of -32 columns are not repacked"),
        ({"num_cols": 0}, "of 0 columns"),
        ({"num_cols": 144}, "144 columns has no whole groups of 32"),
        ({"group_size": 64}, r"scales \(2, 4, 2\), not"),
        ({"tiles": Int4Weight(*random_int4((4, 256), 32, "cpu"))}, r"words \(4, 32\) of 256 columns are not repacked"),
        (
            {"tiles": Int4Weight(*(one.half() for one in repack(*random_int4((4, 256), 32, "cpu"), group_size=32)))},
            "int32",
        ),
    ],
)
def test_what_was_not_repacked_is_refused(change, words):
    tiles = repack(*random_int4((4, 256), 32, "cpu"), group_size=32)
    with pytest.raises(ValueError, match=words):
        unrepack(**({"tiles": tiles, "num_cols": 256, "group_size": 32} | change))


def test_no_rows_are_no_words():
    tiles = repack(*random_int4((0, 256), 32, "cpu"), group_size=32)
    assert [one.shape for one in unrepack(tiles, num_cols=256, group_size=32)] == [(0, 32), (0, 8)]
