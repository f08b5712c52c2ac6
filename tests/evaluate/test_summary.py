"""Statistics against their definitions."""

import math

import numpy as np
import pytest

from quantkit.evaluate.divergence import Divergence
from quantkit.evaluate.summary import histogram_of, sequence_mean, summarize


def divergence(num_sequences=6, num_predictions=50, seed=0):
    random = np.random.default_rng(seed)
    num = num_sequences * num_predictions
    source = random.gamma(2.0, 1.0, num)
    return Divergence(
        kl=random.lognormal(-7, 2, num),
        source_nll=source,
        output_nll=source + random.normal(0.01, 0.1, num),
        same_top=random.random(num) < 0.9,
        top_shift=random.normal(0, 0.02, num),
    )


def test_figures_are_those_of_all_predictions():
    one = divergence()
    found = summarize(one, 6)
    assert found.num_predictions == 300
    assert found.source_perplexity == pytest.approx(math.exp(sum(one.source_nll) / 300), rel=1e-12)
    assert found.output_perplexity == pytest.approx(math.exp(sum(one.output_nll) / 300), rel=1e-12)
    assert found.ratio.value == pytest.approx(found.output_perplexity / found.source_perplexity, rel=1e-12)
    assert found.kl.mean.value == pytest.approx(sum(one.kl) / 300, rel=1e-12)
    assert found.kl.maximum == max(one.kl)
    ordered = sorted(one.kl)
    assert found.kl.median == pytest.approx((ordered[149] + ordered[150]) / 2)
    # between neighbours: 0.9 of the way from the first to the last is at place 269.1, and so on
    for share, value in ((0.9, found.kl.p90), (0.99, found.kl.p99), (0.999, found.kl.p99_9)):
        place = share * 299
        low = math.floor(place)
        assert value == pytest.approx(ordered[low] + (place - low) * (ordered[low + 1] - ordered[low]))
    assert found.same_top.value == pytest.approx(sum(one.same_top) / 300)
    assert found.top_shift_rms == pytest.approx(math.sqrt(sum(one.top_shift**2) / 300))
    assert found.top_shift_mean == pytest.approx(sum(one.top_shift) / 300)


def test_standard_errors_are_of_sequences_and_cover_the_truth():
    """Predictions of a sequence share half of their variance: taken for independent they would be far too sure."""
    random = np.random.default_rng(1)
    covered = naive = 0
    for _ in range(400):
        values_NP = 3 + random.normal(size=(30, 1)) + random.normal(size=(30, 40))
        one = sequence_mean(values_NP)
        covered += abs(one.value - 3) < 1.96 * one.standard_error
        naive += abs(one.value - 3) < 1.96 * values_NP.std() / math.sqrt(values_NP.size)
    assert 0.91 < covered / 400 < 0.98
    assert naive / 400 < 0.6


def test_the_ratios_error_is_the_spread_of_ratios():
    """Delta method against many draws."""
    random = np.random.default_rng(2)
    ratios, errors = [], []
    for _ in range(300):
        change_NP = 0.05 + 0.03 * random.normal(size=(40, 1)) + 0.1 * random.normal(size=(40, 20))
        zeros = np.zeros(800)
        one = Divergence(
            kl=zeros, source_nll=zeros + 2, output_nll=2 + change_NP.ravel(), same_top=zeros == 0, top_shift=zeros
        )
        found = summarize(one, 40).ratio
        ratios.append(found.value)
        errors.append(found.standard_error)
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.1)


def test_one_sequence_tells_no_standard_error():
    found = summarize(divergence(num_sequences=1), 1)
    assert found.ratio.standard_error is None
    assert found.kl.mean.standard_error is None
    assert found.same_top.standard_error is None


def test_every_value_is_counted_once():
    values = np.array([0.0, 1e-12, 1e-9, 1.5e-3, 2e-3, 1.0, 1e3])
    found = histogram_of(values)
    assert found.below == 2
    assert found.below + sum(found.counts) == len(values)
    assert len(found.edges) == len(found.counts) + 1
    assert found.edges[0] == pytest.approx(1e-9)
    for low, high, number in zip(found.edges[:-2], found.edges[1:-1], found.counts[:-1], strict=True):
        assert number == ((values >= low) & (values < high)).sum()
    assert found.counts[0] == 1
    assert found.counts[-1] == 1  # what is beyond the last edge is in the last bin
    nothing = histogram_of(np.zeros(4))
    assert (nothing.below, nothing.counts, nothing.edges) == (4, (), ())
