"""Bins of magnitudes against the edges they are named by, found by comparing and not by bits."""

import numpy as np
import pytest

from quantkit.numerics.magnitudes import NUM_BINS, bins_of, centers, lower_edges, quantile


def test_a_magnitude_lies_between_the_edges_of_its_bin():
    generator = np.random.default_rng(0)
    values = (generator.standard_normal(100_000) * np.exp(generator.uniform(-30, 20, 100_000))).astype(np.float32)
    expected = np.searchsorted(lower_edges(), np.abs(values.astype(np.float64)), side="right") - 1
    assert np.array_equal(bins_of(values), expected)


def test_edges_belong_to_the_bin_above():
    edges = lower_edges().astype(np.float32)
    assert np.array_equal(bins_of(edges), np.arange(NUM_BINS))
    assert np.array_equal(bins_of(-np.nextafter(edges[1:], np.float32(0))), np.arange(NUM_BINS - 1))


def test_what_is_out_of_range_is_counted_at_the_ends():
    assert bins_of(np.array([0.0, 1e-30, 1e30], np.float32)).tolist() == [0, 0, NUM_BINS - 1]


@pytest.mark.parametrize(("fraction", "least"), [(0.5, 1.0), (0.99, 100.0), (1.0, 1000.0)])
def test_a_quantile_is_at_most_an_eighth_too_large(fraction, least):
    values = np.concatenate([np.full(60, 1.0), np.full(39, 100.0), [1000.0]]).astype(np.float32)
    found = quantile(np.bincount(bins_of(values), minlength=NUM_BINS), fraction)
    assert least < found <= least * 1.125 * 1.001


def test_a_quantile_of_nothing_is_zero():
    assert quantile(np.zeros(NUM_BINS, np.int64), 0.5) == 0.0


def test_centers_lie_in_their_bins():
    assert np.array_equal(bins_of(centers().astype(np.float32)), np.arange(NUM_BINS))
