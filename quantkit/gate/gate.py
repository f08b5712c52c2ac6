"""The verdict: is the drop from BASELINE to CANDIDATE within what is allowed?"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from quantkit.errors import UsageError
from quantkit.gate.paired import (
    Floats,
    Stratum,
    bounds,
    mcnemar_p,
    mean_drop,
    normal_quantile,
    resampled_drops,
    times_the_questions,
)
from quantkit.gate.pairs import Pairing, Pairs

POWER = 0.8
LEAST_MARGIN = 1e-6  # a ten-thousandth of a point: nobody has the questions
LEAST_USUAL_DROP = 0.05  # points: 0.008 is likely a share
ROUNDING = 1e-9  # points: what is equal but for floats is equal
MOST_CONFIDENCE = 0.999  # ten of 10,000 resamples lie beyond


class Verdict(StrEnum):
    """Of a drop: by its interval, or, with ``is_point``, by what was observed, which is within or not."""

    WITHIN = "within"
    NOT_SHOWN = "not shown"  # the interval holds the limit: it may be within or not
    EXCEEDED = "exceeded"  # all of the interval lies beyond the limit, or the observed drop does


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """``max_drop`` in percentage points. Of the upper bound or the observed drop, of the mean or of each task."""

    max_drop: float
    confidence: float = 0.95
    is_point: bool = False
    is_per_task: bool = False
    is_pooled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionsNeeded:
    """To show that a drop is within the margin, at the rate of flips seen here."""

    even_chance: int | None  # that the bound is within, where the two are equal; None where there is no margin
    likely: int | None  # a chance of POWER
    at_observed: int | None  # an even chance, where the observed drop is the true one; None where it is no less


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Accuracies in percent, changes in points (candidate minus baseline); lost questions were right before."""

    num_questions: int
    baseline: float
    candidate: float
    change: float
    low: float
    high: float
    num_lost: int
    num_gained: int
    mcnemar_p: float | None
    needed: QuestionsNeeded
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskComparison:
    """One task under one filter."""

    pairs: Pairs
    comparison: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """Every task, the mean, and whether the gate is open."""

    criterion: Criterion
    tasks: tuple[TaskComparison, ...]
    overall: Comparison
    num_unpaired: int
    warnings: tuple[str, ...]

    @property
    def passes(self) -> bool:
        """No allowance for many tasks is needed where each must pass: one that is too bad passes as rarely as alone."""
        judged = [one.comparison for one in self.tasks] if self.criterion.is_per_task else [self.overall]
        return all(one.verdict is Verdict.WITHIN for one in judged)


def check_criterion(criterion: Criterion) -> None:
    """Raises UsageError for what is no drop or no confidence."""
    if not 0 <= criterion.max_drop < 100:
        raise UsageError(
            f"--max-drop {criterion.max_drop:g} is no number of percentage points from 0 up to 100",
            remedy="give 0.8, say",
        )
    if not 0.5 < criterion.confidence <= MOST_CONFIDENCE:
        raise UsageError(
            f"--confidence {criterion.confidence:g} is not above 0.5 and at most {MOST_CONFIDENCE}",
            remedy="give 0.95, say",
        )
    if criterion.is_per_task and criterion.is_pooled:
        raise UsageError("--pooled is of the overall mean, --per-task of each task", remedy="leave one of them out")


def _doubts(criterion: Criterion) -> tuple[str, ...]:
    """Warnings of what is likely not meant."""
    if not 0 < criterion.max_drop < LEAST_USUAL_DROP:
        return ()
    return (
        f"--max-drop {criterion.max_drop:g} is in percentage points: 1 of {100 / criterion.max_drop:,.0f} questions; "
        f"write {100 * criterion.max_drop:g} if a share of {criterion.max_drop:g} is meant",
    )


def judge(pairing: Pairing, criterion: Criterion) -> GateReport:
    """Compare every task and their mean."""
    tasks = tuple(TaskComparison(pairs=one, comparison=_compare([[one]], criterion)) for one in pairing.tasks)
    by_task = defaultdict(list)
    for one in pairing.tasks:
        by_task[one.task].append(one)
    return GateReport(
        criterion=criterion,
        tasks=tasks,
        overall=tasks[0].comparison if len(tasks) == 1 else _compare(list(by_task.values()), criterion),
        num_unpaired=pairing.num_unpaired,
        warnings=(*_doubts(criterion), *pairing.warnings),
    )


def _compare(tasks: Sequence[Sequence[Pairs]], criterion: Criterion) -> Comparison:
    """Of tasks, each with its filters. A question counts once: the mean of its filters."""
    sides = [[_by_question(task, is_candidate=one) for task in tasks] for one in (False, True)]
    sizes = [len(task) for task in sides[0]]
    total = sum(sizes)
    weights = [size / total if criterion.is_pooled else 1 / len(tasks) for size in sizes]
    strata = [
        Stratum(drops=before - after, weight=weight) for before, after, weight in zip(*sides, weights, strict=True)
    ]
    drop = 100 * mean_drop(strata)
    least, most = bounds(100 * resampled_drops(strata), criterion.confidence)
    drops = np.concatenate([one.drops for one in strata])
    num_lost, num_gained = int((drops > 0).sum()), int((drops < 0).sum())
    is_binary = all(bool(np.isin(scores, (0, 1)).all()) for side in sides for scores in side)
    accuracies = [
        100 * math.fsum(weight * math.fsum(one) / len(one) for one, weight in zip(side, weights, strict=True))
        for side in sides
    ]
    return Comparison(
        num_questions=total,
        baseline=accuracies[0],
        candidate=accuracies[1],
        change=0.0 - drop,
        low=-most,
        high=-least,
        num_lost=num_lost,
        num_gained=num_gained,
        mcnemar_p=mcnemar_p(num_lost, num_gained) if is_binary else None,
        needed=_needed(strata, drop, criterion),
        verdict=_verdict(drop, (least, most), criterion),
    )


def _by_question(filters: Sequence[Pairs], *, is_candidate: bool) -> Floats:
    if len(filters) == 1:
        return filters[0].candidate if is_candidate else filters[0].baseline
    scores = defaultdict(list)
    for pairs in filters:
        for one, score in zip(pairs.ids, pairs.candidate if is_candidate else pairs.baseline, strict=True):
            scores[one].append(float(score))
    return np.array([math.fsum(scores[one]) / len(scores[one]) for one in sorted(scores)], np.float64)


def _verdict(drop: float, interval: tuple[float, float], criterion: Criterion) -> Verdict:
    if (drop if criterion.is_point else interval[1]) <= criterion.max_drop + ROUNDING:
        return Verdict.WITHIN
    return Verdict.EXCEEDED if criterion.is_point or interval[0] > criterion.max_drop else Verdict.NOT_SHOWN


def _needed(strata: Sequence[Stratum], drop: float, criterion: Criterion) -> QuestionsNeeded:
    z = normal_quantile(criterion.confidence)
    margin = criterion.max_drop / 100

    def num_questions(left: float, quantiles: float) -> int | None:
        if left < LEAST_MARGIN:
            return None
        num_now = sum(len(one.drops) for one in strata)
        return math.ceil(num_now * times_the_questions(strata, margin=left, z=quantiles) - 1e-9)

    return QuestionsNeeded(
        even_chance=num_questions(margin, z),
        likely=num_questions(margin, z + normal_quantile(POWER)),
        at_observed=num_questions(margin - drop / 100, z),
    )
