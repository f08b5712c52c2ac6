"""Paired statistics: an interval of the mean difference, McNemar's exact test, how many questions it takes.

A difference is baseline minus candidate of one question: 1 was right and is wrong, -1 was wrong and is right.
Legend of shapes: ``S`` resamples, ``V`` distinct differences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

NUM_RESAMPLES = 10_000
SEED = 20_240_801
# Where hardly a pair differs, resampling what was seen finds next to no uncertainty, and none in ten questions that all
# agree. So two more pairs flip each way, shared among the tasks of a mean. Bonett and Price add one: of samples of 100
# questions of which 2 % are lost, 14 % would then have too small a bound, and not 5 %.
ADDED_PAIRS = 2.0
_CHUNK = 1 << 22  # numbers drawn at a time

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stratum:
    """The differences of a task's questions, and what the task weighs in the mean."""

    drops: Floats
    weight: float


def mean_drop(strata: Sequence[Stratum]) -> float:
    """Weighted mean of the tasks' means; exact sums, so the order of questions changes nothing."""
    return math.fsum(one.weight * math.fsum(one.drops) / len(one.drops) for one in strata)


def resampled_drops(strata: Sequence[Stratum]) -> Floats:
    """Means of resampled questions, each task's among themselves.

    Half of them are drawn with the sides exchanged: exchanging the sides then turns the signs, and nothing else.
    """
    total_S = np.zeros(NUM_RESAMPLES)
    added = ADDED_PAIRS / len(strata)
    for index, one in enumerate(strata):
        halves = [sign * _resample(sign * one.drops, added, index) for sign in (1.0, -1.0)]
        total_S += one.weight * np.concatenate(halves)
    return total_S


def _resample(drops: Floats, added: float, index: int) -> Floats:
    """Means of ``len(drops)`` draws: how often each distinct difference is drawn is multinomial."""
    value_V, count_V = np.unique(np.concatenate([drops, [1.0, -1.0]]), return_counts=True)
    weight_V = count_V + np.where(np.abs(value_V) == 1, added - 1, 0.0)
    share_V = weight_V / weight_V.sum()
    generator = np.random.default_rng([SEED, index])
    num_left, means = NUM_RESAMPLES // 2, []
    while num_left:
        num = min(num_left, max(1, _CHUNK // len(value_V)))
        means.append(generator.multinomial(len(drops), share_V, size=num) @ value_V / len(drops))
        num_left -= num
    return np.concatenate(means)


def bounds(resampled: Floats, confidence: float) -> tuple[float, float]:
    """One-sided lower and upper bounds, each of this confidence: order statistics, as far from either end."""
    ordered = np.sort(resampled)
    rank = math.ceil(confidence * len(ordered) - 1e-9)
    return float(ordered[len(ordered) - rank]), float(ordered[rank - 1])


def mcnemar_p(num_lost: int, num_gained: int) -> float:
    """Exact and two-sided: flips are tosses of a coin where neither side is better."""
    num_flips, fewer = num_lost + num_gained, min(num_lost, num_gained)
    ways, tail = 1, 0
    for index in range(fewer + 1):
        tail += ways
        ways = ways * (num_flips - index) // (index + 1)
    return min(1.0, 2 * tail / (1 << num_flips))


def normal_quantile(probability: float) -> float:
    """Of the standard normal distribution."""
    return NormalDist().inv_cdf(probability)


def largest_passing_drop(rate: float, num_questions: int, *, margin: float, confidence: float) -> float:
    """The largest observed drop whose bound is within the margin: margin - z sqrt(rate / n)."""
    return margin - normal_quantile(confidence) * math.sqrt(rate / num_questions)


def times_the_questions(strata: Sequence[Stratum], *, margin: float, z: float) -> float:
    """By how much every task must grow until z standard errors are the margin, at the rates of flips seen here.

    Of one task: the n with z sqrt(rate n + 4) / n = margin, about rate (z / margin)^2. The 4 are the added pairs.
    """
    added = 2 * ADDED_PAIRS / len(strata)
    linear = math.fsum(one.weight**2 * math.fsum(one.drops**2) / len(one.drops) ** 2 for one in strata)
    constant = math.fsum(one.weight**2 * added / len(one.drops) ** 2 for one in strata)
    a, b = linear * z**2, constant * z**2
    return (a + math.sqrt(a**2 + 4 * margin**2 * b)) / (2 * margin**2)
