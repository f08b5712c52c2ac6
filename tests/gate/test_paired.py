"""The statistics: known values, the table of sample sizes, coverage, and what exchanging the sides does."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.gate.paired import (
    NUM_RESAMPLES,
    Stratum,
    bounds,
    largest_passing_drop,
    mcnemar_p,
    mean_drop,
    normal_quantile,
    resampled_drops,
    times_the_questions,
)


def drops(num_questions, num_lost, num_gained):
    return np.array([1.0] * num_lost + [-1.0] * num_gained + [0.0] * (num_questions - num_lost - num_gained))


def one_task(*counts):
    return [Stratum(drops=drops(*counts), weight=1.0)]


@pytest.mark.parametrize(
    ("num_lost", "num_gained", "p"),
    [
        (0, 0, 1.0),
        (5, 5, 1.0),
        (0, 1, 1.0),
        (0, 5, 0.0625),
        (1, 9, 0.021484375),  # 2 (1 + 10) / 1024
        (6, 16, 0.052478790283203125),  # 2 x 110,056 / 2**22
        (59, 6, 4.964650327128617e-12),  # 2 x 91,581,634 / 2**65
        (2000, 2000, 1.0),
    ],
)
def test_mcnemar_known_values(num_lost, num_gained, p):
    assert mcnemar_p(num_lost, num_gained) == pytest.approx(p, rel=1e-12)
    assert mcnemar_p(num_lost, num_gained) == mcnemar_p(num_gained, num_lost)


def test_mcnemar_is_the_share_of_tosses_that_are_no_likelier():
    for num_flips in range(1, 12):
        tosses = [sum(one) for one in itertools.product((0, 1), repeat=num_flips)]
        for num_lost in range(num_flips + 1):
            distance = abs(num_lost - num_flips / 2)
            share = sum(abs(one - num_flips / 2) >= distance for one in tosses) / len(tosses)
            assert mcnemar_p(num_lost, num_flips - num_lost) == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize(
    ("num_questions", "standard_error", "passes"),
    [
        (1319, 0.55, -0.11),  # GSM8K
        (1172, 0.58, -0.16),  # ARC-C
        (2376, 0.41, 0.13),  # ARC-E
        (14042, 0.17, 0.52),  # MMLU
        (12032, 0.18, 0.50),  # MMLU-Pro
        (2500, 0.40, 0.14),  # BFCL
        (2000, 0.45, 0.06),  # K2VV
    ],
)
def test_what_a_task_can_show_at_4_percent_flips(num_questions, standard_error, passes):
    """The table of the reference: standard error in points, largest observed drop that passes 0.8 at 95 %."""
    assert 100 * math.sqrt(0.04 / num_questions) == pytest.approx(standard_error, abs=0.006)
    drop = 100 * largest_passing_drop(0.04, num_questions, margin=0.008, confidence=0.95)
    assert drop == pytest.approx(passes, abs=0.011)
    num_flips = round(0.02 * num_questions)
    times = times_the_questions(one_task(num_questions, num_flips, num_flips), margin=0.008, z=normal_quantile(0.95))
    assert (times <= 1) == (passes > 0)  # can it be shown where nothing is lost?


def test_questions_needed_are_those_whose_bound_is_the_margin():
    """About rate (z / margin)^2, and the bootstrap agrees."""
    z = normal_quantile(0.95)
    times = times_the_questions(one_task(1000, 20, 20), margin=0.008, z=z)
    assert 0.04 * (z / 0.008) ** 2 < 1000 * times < 1.06 * 0.04 * (z / 0.008) ** 2
    num_questions = math.ceil(1000 * times)
    assert z * math.sqrt(0.04 * num_questions + 4) / num_questions == pytest.approx(0.008, rel=1e-3)
    num_flips = round(0.02 * num_questions)
    bound = bounds(resampled_drops(one_task(num_questions, num_flips, num_flips)), 0.95)[1]
    assert bound == pytest.approx(0.008, rel=0.05)


@pytest.mark.parametrize(
    ("margin", "power", "needed"), [(0.008, 0.5, 1786), (0.008, 0.8, 3962), (0.01, 0.5, 1175), (0.01, 0.8, 2570)]
)
def test_questions_needed_at_4_percent_flips(margin, power, needed):
    """As the README says."""
    z = normal_quantile(0.95) + normal_quantile(power)
    assert math.ceil(1000 * times_the_questions(one_task(1000, 20, 20), margin=margin, z=z)) == needed


@pytest.mark.parametrize("num_tasks", [2, 5])
def test_tasks_that_are_alike_need_what_one_needs(num_tasks):
    alone = times_the_questions(one_task(num_tasks * 500, num_tasks * 10, num_tasks * 10), margin=0.008, z=1.6)
    strata = [Stratum(drops=drops(500, 10, 10), weight=1 / num_tasks)] * num_tasks
    assert times_the_questions(strata, margin=0.008, z=1.6) == pytest.approx(alone, rel=1e-12)


def test_no_flips_in_few_questions_show_nothing():
    few, many = (bounds(resampled_drops(one_task(number, 0, 0)), 0.95)[1] for number in (10, 1000))
    assert few > 0.2
    assert 0.003 <= many < 0.0045  # the exact bound of no loss in 1000 is 0.0030


DIFFERENCES = st.lists(st.sampled_from([-1.0, -0.5, -0.1, 0.0, 0.25, 1.0]), min_size=1, max_size=60)


@given(st.lists(DIFFERENCES, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_order_changes_nothing_and_exchanged_sides_turn_the_signs(tasks, random):
    shuffled = [random.sample(one, len(one)) for one in tasks]
    made = [
        [Stratum(drops=sign * np.array(one), weight=1 / len(of)) for one in of]
        for of, sign in ((tasks, 1), (shuffled, 1), (tasks, -1))
    ]
    means, intervals = [mean_drop(one) for one in made], [bounds(resampled_drops(one), 0.95) for one in made]
    assert means[0] == means[1] == -means[2]
    assert intervals[0] == intervals[1] == (-intervals[2][1], -intervals[2][0])
    assert -1 <= intervals[0][0] <= intervals[0][1] <= 1


def test_resamples_have_the_standard_error_of_the_mean():
    strata = [Stratum(drops=drops(1000, 40, 20), weight=0.75), Stratum(drops=drops(200, 4, 10), weight=0.25)]
    resampled = resampled_drops(strata)
    assert resampled.shape == (NUM_RESAMPLES,)
    assert resampled.mean() == pytest.approx(mean_drop(strata), abs=0.001)
    expected = math.sqrt(sum(one.weight**2 * (one.drops.var() + 2 / len(one.drops)) / len(one.drops) for one in strata))
    assert resampled.std() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("counts", [(500, 10, 8), (100, 1, 0)])
def test_tasks_that_are_alike_have_the_interval_of_one_that_is_as_large(counts):
    """Draws of tasks are independent, and added flips are shared."""
    alike = resampled_drops([Stratum(drops=drops(*counts), weight=0.25)] * 4)
    whole = resampled_drops(one_task(*(4 * count for count in counts)))
    assert alike.std() == pytest.approx(whole.std(), rel=0.03)
    assert alike.mean() == pytest.approx(whole.mean(), abs=0.0003)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_questions", "rate", "share_lost", "least", "most"),
    [
        (1319, 0.04, 0.6, 0.94, 0.975),
        (1319, 0.04, 0.5, 0.94, 0.975),
        (500, 0.10, 0.8, 0.935, 0.975),
        (200, 0.10, 0.8, 0.935, 0.975),
        (100, 0.02, 1.0, 0.95, 1.0),  # few flips: more than asked for, never less
        (1319, 0.005, 1.0, 0.94, 1.0),
        (30, 0.30, 0.7, 0.94, 0.99),
    ],
)
def test_the_bound_covers_as_often_as_it_says(num_questions, rate, share_lost, least, most):
    """Simulated pairs of known rates; 2,000 samples have a standard error of 0.5 % at 95 %."""
    losing, gaining = rate * share_lost, rate * (1 - share_lost)
    generator = np.random.default_rng(1)
    counts = generator.multinomial(num_questions, [losing, gaining, 1 - rate], size=2000)[:, :2]
    seen, repeats = np.unique(counts, axis=0, return_counts=True)
    covered = sum(
        repeat
        for (num_lost, num_gained), repeat in zip(seen.tolist(), repeats.tolist(), strict=True)
        if bounds(resampled_drops(one_task(num_questions, num_lost, num_gained)), 0.95)[1] >= losing - gaining
    )
    assert least <= covered / 2000 <= most


@pytest.mark.slow
def test_the_bound_of_a_mean_over_tasks_covers_as_often_as_it_says():
    generator = np.random.default_rng(2)
    rates = [(1319, 0.03, 0.02), (400, 0.04, 0.03), (250, 0.02, 0.03)]
    true_drop = sum(losing - gaining for _, losing, gaining in rates) / len(rates)
    covered = 0
    for _ in range(300):
        strata = []
        for num_questions, losing, gaining in rates:
            num_lost, num_gained, _ = generator.multinomial(num_questions, [losing, gaining, 1 - losing - gaining])
            strata.append(Stratum(drops=drops(num_questions, num_lost, num_gained), weight=1 / len(rates)))
        low, high = bounds(resampled_drops(strata), 0.95)
        covered += (low <= true_drop) + (high >= true_drop)
    assert 0.93 <= covered / 600 <= 0.98


def test_fractions_are_resampled_too():
    generator = np.random.default_rng(3)
    f1 = generator.random(700) - generator.random(700)
    low, high = bounds(resampled_drops([Stratum(drops=f1, weight=1.0)]), 0.95)
    half = normal_quantile(0.95) * math.sqrt((f1.var() + 4 / 700) / 700)
    assert (high - low) / 2 == pytest.approx(half, rel=0.04)
    assert low < f1.mean() < high
