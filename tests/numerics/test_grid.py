import numpy as np
import pytest

from quantkit.numerics import fp8
from quantkit.numerics.grid import fp8_grid, value_grid


def test_values_within_half_a_step_of_the_grid():
    values = np.random.default_rng(0).standard_normal((5, 128)).astype(np.float32)
    values[2] *= np.float32(1e-44)
    ints, unit = value_grid(values, group_size=64)
    assert ints.dtype == np.int32
    assert unit.dtype == np.float64
    assert (np.abs(ints).reshape(5, 2, 64).max(-1) == 65536).all()
    # the quotient has one rounding of its own
    error = np.abs(values - ints * unit.repeat(64, 1))
    assert (error <= 0.5 * unit.repeat(64, 1) * (1 + 1e-6)).all()


def test_zero_group_has_unit_zero():
    values = np.ones((1, 64), np.float32)
    values[0, 32:] = [0.0, -0.0] * 16
    ints, unit = value_grid(values, group_size=32)
    assert unit.tolist() == [[2.0**-16, 0.0]]
    assert not ints[0, 32:].any()


@pytest.mark.parametrize("block", [(128, 128), (1, 256), (300, 256), (16, 64)])
def test_codes_are_the_grid_where_a_group_has_one_scale(block, random_fp8):
    codes, scale = random_fp8(40, 256, block, row_offset=10)
    ints, unit = fp8_grid(codes, scale, block=block, row_offset=10, group_size=64)
    values = fp8.dequantize(codes, scale, block=block, row_offset=10)
    # a product of 4 and 24 bits is exact in float64, and float32 is its nearest
    np.testing.assert_array_equal((ints * unit.repeat(64, 1)).astype(np.float32), values)


def test_groups_across_blocks_use_the_decoded_values(random_fp8):
    codes, scale = random_fp8(8, 128, (1, 32))
    ints, unit = fp8_grid(codes, scale, block=(1, 32), group_size=64)
    expected = value_grid(fp8.dequantize(codes, scale, block=(1, 32)), group_size=64)
    np.testing.assert_array_equal(ints, expected[0])
    np.testing.assert_array_equal(unit, expected[1])
