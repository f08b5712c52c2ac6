import numpy as np
import pytest
import torch

from quantkit.numerics import bfloat16

ALL_BITS = np.arange(1 << 16, dtype=np.uint16)


def _torch_bits(values):
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).view(torch.uint16).numpy()


def test_all_bits_round_trip(assert_same_bytes):
    values = bfloat16.to_float32(ALL_BITS)
    not_nan = ~np.isnan(values)
    assert_same_bytes("float32", ALL_BITS[not_nan], bfloat16.from_float32(values)[not_nan])
    wide = values[not_nan].astype(float)
    assert_same_bytes("float64", ALL_BITS[not_nan], bfloat16.from_float64(wide))
    assert np.isnan(bfloat16.to_float32(bfloat16.from_float32(values[~not_nan]))).all()
    assert bfloat16.from_float64(np.array([np.nan, -np.nan])).tolist() == [0x7FC0, 0x7FC0]


def test_float32_rounds_as_torch_does(assert_same_bytes):
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    # ties, and one step to either side of them
    words[:100_000] = (words[:100_000] & 0xFFFF0000) + rng.choice(
        np.array([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32), 100_000
    )
    values = words.view(np.float32)
    values = values[~np.isnan(values)]
    assert_same_bytes("bits", _torch_bits(values), bfloat16.from_float32(values))


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (0.0, 0x0000),
        (-0.0, 0x8000),
        (1.0 + 2**-8, 0x3F80),  # tie to even
        (1.0 + 3 * 2**-8, 0x3F82),
        (-(1.0 + 2**-8), 0xBF80),
        (2.0**-133, 0x0001),  # smallest subnormal
        (2.0**-134, 0x0000),  # tie to even
        (3 * 2.0**-134, 0x0002),
        (2.0**-126 * (1 - 2**-9), 0x0080),  # a subnormal that rounds up to the smallest normal
        (3.3961775292304957e38, 0x7F80),  # halfway to 2**128: overflow
        (3.3895313892515355e38, 0x7F7F),
        (np.inf, 0x7F80),
        (-np.inf, 0xFF80),
    ],
)
def test_literals(value, bits):
    assert bfloat16.from_float64(np.array([value])).item() == bits
    assert bfloat16.from_float32(np.array([value], np.float32)).item() == bits


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        # float32 would first round these to the tie, and the tie to the even neighbour
        (1.0 + 2**-8 + 2**-40, 0x3F81),
        (1.0 + 3 * 2**-8 - 2**-40, 0x3F81),
        (-(1.0 + 2**-8 + 2**-40), 0xBF81),
        (2.0**-134 * (1 + 2**-30), 0x0001),
        (3 * 2.0**-134 * (1 - 2**-40), 0x0001),
        (1e300, 0x7F80),
        (-1e300, 0xFF80),
        (1e-300, 0x0000),
        (5e-324, 0x0000),
    ],
)
def test_float64_rounds_once(value, bits):
    assert bfloat16.from_float64(np.array([value])).item() == bits


def test_float64_agrees_with_float32_on_its_values(assert_same_bytes):
    words = np.random.default_rng(1).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    values = words.view(np.float32)
    values = values[~np.isnan(values)]
    assert_same_bytes("bits", bfloat16.from_float32(values), bfloat16.from_float64(values.astype(float)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_first_nonfinite_names_the_first_position(bad):
    values = np.full((70, 900), 3e38, np.float32)
    assert bfloat16.first_nonfinite(values) is None
    assert bfloat16.first_nonfinite(bfloat16.from_float32(values)) is None
    values[60, 7] = values[69, 0] = bad
    assert bfloat16.first_nonfinite(values) == (60, 7)
    assert bfloat16.first_nonfinite(bfloat16.from_float32(values)) == (60, 7)
