"""FP8 blocks from the BF16 that they decode to: the same BF16 again, whatever the codes and the scale were."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.numerics import bfloat16, fp8
from quantkit.numerics.fp8_recover import NotFromFp8Error, recover_fp8


def decoded(codes, scale):
    return bfloat16.from_float32(fp8.dequantize(codes, scale, block=(128, 128)))


def random_codes(seed, shape, top):
    """Codes whose values are at most ``top``, with zeros of both signs and subnormals among them."""
    random = np.random.default_rng(seed)
    allowed = np.flatnonzero(fp8.decode_e4m3(np.arange(127, dtype=np.uint8)) <= top).astype(np.uint8)
    return random.choice(allowed, shape) | (random.integers(0, 2, shape) << 7).astype(np.uint8)


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    top=st.sampled_from([448, 416, 288, 256, 240, 120, 60, 15, 1, 2**-6, 2**-9]),
    scale=st.floats(2.0**-60, 2.0**60, width=32),
)
def test_what_comes_back_decodes_to_the_same(seed, shape, top, scale):
    codes = random_codes(seed, shape, top)
    grid = (-(-shape[0] // 128), -(-shape[1] // 128))
    scales = (np.random.default_rng(seed).uniform(0.5, 2, grid) * scale).astype(np.float32)
    bits = decoded(codes, scales)
    found, found_scales = recover_fp8(bits)
    assert np.array_equal(decoded(found, found_scales), bits)
    assert found_scales.shape == grid


def test_codes_are_the_ones_that_were_there_where_the_largest_is_448():
    codes = random_codes(1, (256, 384), 448)
    codes[::128, ::128] = 0x7E
    scales = np.full((2, 3), 1.7e-4, np.float32)
    found, found_scales = recover_fp8(decoded(codes, scales))
    assert np.array_equal(found, codes)
    assert np.allclose(found_scales, scales, rtol=2**-8)


def test_nothing_but_zeros():
    codes, scales = recover_fp8(np.array([[0, 0x8000]], np.uint16))
    assert codes.tolist() == [[0, 0x80]]
    assert scales.tolist() == [[1]]


@pytest.mark.parametrize("place", [(0, 0), (100, 5), (127, 127)])
def test_one_value_beside_its_place_is_found(place):
    bits = decoded(random_codes(2, (256, 256), 448), np.full((2, 2), 3e-4, np.float32))
    bits[128 + place[0], place[1]] += 1
    with pytest.raises(NotFromFp8Error) as caught:
        recover_fp8(bits)
    assert caught.value.block == (1, 0)


def test_weights_that_were_never_fp8_are_refused():
    values = np.random.default_rng(3).standard_normal((128, 128)).astype(np.float32)
    for bits in (bfloat16.from_float32(values), np.full((1, 1), 0x7F80, np.uint16), np.full((1, 1), 0x7FC0, np.uint16)):
        with pytest.raises(NotFromFp8Error):
            recover_fp8(bits)
