"""Pairs the samples of two logs by task, filter and id."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from quantkit.errors import SourceError, UsageError
from quantkit.gate.sample import NO_FILTER, Sample
from quantkit.gate.sample_log import Key, SampleLog

# what is compared where nothing else is asked for: the first of these that a task has
DEFAULT_METRICS = ("acc_norm", "acc", "exact_match", "correct")

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """The scores of both sides on the same questions of a task, in one order of ids."""

    task: str
    filter: str
    metric: str
    ids: tuple[str, ...]
    baseline: Scores
    candidate: Scores

    @property
    def name(self) -> str:
        """Task, and the filter where there is one."""
        return key_name((self.task, self.filter))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """All pairs, and what is to be known of them."""

    tasks: tuple[Pairs, ...]
    num_unpaired: int
    warnings: tuple[str, ...]


def pair_logs(
    baseline: SampleLog,
    candidate: SampleLog,
    *,
    tasks: Sequence[str] = (),
    metrics: Sequence[str] = (),
    allow_unpaired: bool = False,
) -> Pairing:
    """Every question of both. Raises SourceError for ids on one side only, unless allowed, and for other documents."""
    keys = _wanted({*baseline.samples, *candidate.samples}, tasks)
    sides = [{key: log.samples.get(key, {}) for key in keys} for log in (baseline, candidate)]
    num_unpaired, warnings = _check_paired(baseline, candidate, sides, allow_unpaired=allow_unpaired)
    paired, prompts = [], 0
    for key in keys:
        first, second = (side[key] for side in sides)
        ids = tuple(sorted(first.keys() & second.keys()))
        if not ids:
            continue
        _check_documents(first, second, ids)
        prompts += sum(_differ(first[one].prompt, second[one].prompt) for one in ids)
        metric = _metric([*first.values(), *second.values()], key, metrics)
        scores = [np.array([side[one].score(metric) for one in ids], np.float64) for side in (first, second)]
        task, filter_ = key
        paired.append(Pairs(task=task, filter=filter_, metric=metric, ids=ids, baseline=scores[0], candidate=scores[1]))
    if not paired:
        raise SourceError("no question is in both logs", file=candidate.path, remedy="give two logs of the same tasks")
    if prompts:
        warnings.append(
            f"{prompts:,} pairs had different prompts: chat template or examples differ, not the model alone"
        )
    return Pairing(tasks=tuple(paired), num_unpaired=num_unpaired, warnings=tuple(warnings))


def key_name(key: Key) -> str:
    """Task, and the filter where there is one."""
    task, filter_ = key
    return task if filter_ == NO_FILTER else f"{task}/{filter_}"


def _wanted(keys: set[Key], patterns: Sequence[str]) -> list[Key]:
    """In the order of their names. Raises UsageError for a pattern without a task."""
    found: set[Key] = set()
    for pattern in patterns:
        matches = {key for key in keys if fnmatchcase(key[0], pattern) or fnmatchcase(key_name(key), pattern)}
        if not matches:
            names = sorted(map(key_name, keys))
            raise UsageError(f"--task {pattern} is in neither log", remedy=f"there are: {', '.join(names[:20])}")
        found |= matches
    return sorted(found if patterns else keys)


def _check_paired(
    baseline: SampleLog,
    candidate: SampleLog,
    sides: Sequence[Mapping[Key, Mapping[str, Sample]]],
    *,
    allow_unpaired: bool,
) -> tuple[int, list[str]]:
    """How many samples are on one side alone, and how to say it."""
    alone = [_alone(one, other) for one, other in (sides, sides[::-1])]
    num_unpaired = len(alone[0]) + len(alone[1])
    if not num_unpaired:
        return 0, []
    counts = f"{len(alone[0]):,} are in {baseline.path} alone, {len(alone[1]):,} in {candidate.path} alone"
    if allow_unpaired:
        names = sorted({key_name((one.task, one.filter)) for one in (*alone[0], *alone[1])})
        return num_unpaired, [f"not compared: {num_unpaired:,} samples of {', '.join(names)}: {counts}"]
    first = (alone[0] or alone[1])[0]
    raise SourceError(
        f"{num_unpaired:,} samples have no pair: {counts}; the first is id {first.id} of "
        f"{key_name((first.task, first.filter))}{_other_tasks(sides)}",
        file=first.place,
        remedy="evaluate both on the same questions, or compare what both have with --allow-unpaired",
    )


def _other_tasks(sides: Sequence[Mapping[Key, Mapping[str, Sample]]]) -> str:
    """Where no task is on both sides, it is likely a name that differs."""
    names = [sorted({key_name(key) for key, samples in side.items() if samples}) for side in sides]
    if set(names[0]) & set(names[1]):
        return ""
    return f" (tasks of the one: {', '.join(names[0][:3])}; of the other: {', '.join(names[1][:3])})"


def _alone(one: Mapping[Key, Mapping[str, Sample]], other: Mapping[Key, Mapping[str, Sample]]) -> list[Sample]:
    return [sample for key, samples in one.items() for id_, sample in samples.items() if id_ not in other[key]]


def _check_documents(first: Mapping[str, Sample], second: Mapping[str, Sample], ids: Sequence[str]) -> None:
    """Only hashes that both logs have say anything."""
    others = list(_other_documents(first, second, ids))
    if others:
        one, other = first[others[0]], second[others[0]]
        raise SourceError(
            f"id {one.id} of {key_name((one.task, one.filter))} is another document in {other.place}, as are "
            f"{len(others):,} of {len(ids):,} in all",
            file=one.place,
            remedy="evaluate both with the same version of the task",
        )


def _other_documents(first: Mapping[str, Sample], second: Mapping[str, Sample], ids: Sequence[str]) -> Iterator[str]:
    for one in ids:
        documents = first[one].document, second[one].document
        if any(documents[0][name] != documents[1][name] for name in documents[0].keys() & documents[1].keys()):
            yield one


def _differ(one: str | None, other: str | None) -> bool:
    return None not in (one, other) and one != other


def _metric(samples: Sequence[Sample], key: Key, wanted: Sequence[str]) -> str:
    """The first of those wanted that any line has: a line without it is an error then."""
    names = {name: None for sample in samples for name in sample.metrics}
    metric = next((name for name in wanted or DEFAULT_METRICS if name in names), None)
    if metric is None:
        raise SourceError(
            f"{key_name(key)} has none of the metrics {', '.join(wanted or DEFAULT_METRICS)}",
            file=samples[0].place,
            remedy=f"name one with --metric of which more is better; there are: {', '.join(sorted(names)) or 'none'}",
        )
    return metric
