"""FP8 storage told from histograms, against torch's own cast of the values."""

import numpy as np
import pytest
import torch

from quantkit.numerics.fp8 import round_e4m3
from quantkit.numerics.fp8_error import Fp8Error, fp8_error
from quantkit.numerics.magnitudes import NUM_BINS, bins_of, lower_edges


def cast(values):
    """torch's cast, which stores NaN beyond 464: clamped as engines clamp."""
    clamped = torch.from_numpy(np.asarray(values, np.float32)).clamp(-448, 448)
    return clamped.to(torch.float8_e4m3fn).float().numpy().astype(np.float64)


def counted(values):
    return np.bincount(bins_of(np.abs(values).astype(np.float32)).ravel(), minlength=NUM_BINS)


def exact(values, scale):
    """Clipped fraction and relative error of the values themselves."""
    scaled = values.astype(np.float64) / scale
    errors = cast(scaled) * scale - values
    return (np.abs(scaled) > 448).mean(), np.sqrt(np.square(errors).sum() / np.square(values, dtype=np.float64).sum())


def test_rounding_is_that_of_torch_at_every_code_between_them_and_beyond():
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    middles = (codes[1:] + codes[:-1]) / 2  # ties
    near = [np.nextafter(middles, np.float32(side), dtype=np.float32) for side in (0, 1e9)]
    values = np.concatenate([codes, middles, *near, [460, 464, 480, 1e30, 1e-30, 2.0**-10]]).astype(np.float32)
    values = np.concatenate([values, -values])
    assert np.array_equal(round_e4m3(values.astype(np.float64)), cast(values))


def test_rounding_is_that_of_torch_for_many_values():
    generator = np.random.default_rng(0)
    values = generator.standard_normal(200_000) * np.exp(generator.uniform(-12, 8, 200_000))
    values = values.astype(np.float32)
    assert np.array_equal(round_e4m3(values.astype(np.float64)), cast(values))


@pytest.mark.parametrize("sigma", [0.002, 0.03, 1.0, 150.0, 900.0])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0137])
def test_a_histogram_tells_what_the_values_tell(sigma, tail, scale):
    """Within 2 % where nothing is clipped: in an eighth of an octave a smooth density is even to about 1 %, and 2e5
    values know their mean square error to 1 %. Where the tail is clipped its density falls by half in a bin, and the
    square of what is cut off is told to 5 %; how much is clipped, to the one bin in which that begins.
    """
    generator = np.random.default_rng(1)
    values = generator.standard_t(5, 200_000) if tail else generator.standard_normal(200_000)
    values = (values * sigma).astype(np.float32)
    histogram = counted(values)
    found = fp8_error(histogram, float(np.abs(values).max()), scale)
    clipped, relative = exact(values, scale)
    assert found.relative == pytest.approx(relative, rel=0.05 if clipped else 0.02)
    begins = histogram[bins_of(np.array([448 * scale], np.float32))[0]]
    assert abs(found.clipped_fraction - clipped) <= begins / values.size
    assert found.num_values == 200_000


@pytest.mark.parametrize("scale", [1.0, 0.7, 3e-3])
def test_whatever_lies_in_a_bin_the_error_is_within_what_the_bin_allows(scale):
    """Values at one edge: the worst that a histogram hides."""
    values = np.repeat(lower_edges()[1:-1].astype(np.float32), 3)
    values = values[(values > 1e-6 * scale) & (values < 448 * scale)]
    found = fp8_error(counted(values), float(values.max()), scale)
    _, relative = exact(values, scale)
    half_step = 2.0**-4  # of E4M3, relative to a normal value; and an eighth for the place in the bin
    assert abs(found.relative - relative) <= half_step * 1.125
    assert found.squares == pytest.approx(np.square(values, dtype=np.float64).sum(), rel=1.125**2 - 1)


def test_nothing_is_clipped_at_the_scale_of_the_largest():
    values = np.random.default_rng(2).standard_normal(50_000).astype(np.float32)
    absmax = float(np.abs(values).max())
    assert fp8_error(counted(values), absmax, absmax / 448).num_clipped == 0
    assert fp8_error(counted(values), absmax, absmax / 449).num_clipped > 0


def test_sums_add_up():
    values = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    parts = [fp8_error(counted(part), 10.0, 0.01) for part in (values[:300], values[300:])]
    whole = fp8_error(counted(values), 10.0, 0.01)
    both = parts[0] + parts[1]
    assert (both.num_values, both.num_clipped) == (whole.num_values, pytest.approx(whole.num_clipped))
    assert both.relative == pytest.approx(whole.relative)
    assert Fp8Error().relative == Fp8Error().clipped_fraction == 0.0
