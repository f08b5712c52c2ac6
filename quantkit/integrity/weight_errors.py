"""Relative error per weight and per class, exact sums of per-row sums: no split into tasks changes a digit."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

UNBOUNDED = 1e9  # in place of infinity, which JSON does not know


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightError:
    """Squared error and squared weight of one quantized weight, in units of the weight squared."""

    name: str
    role: str
    error2: float
    weight2: float

    @property
    def relative(self) -> float:
        """Root of the ratio; 0 for a weight of zeros that stayed one, ``UNBOUNDED`` for one that did not."""
        if self.weight2:
            return math.sqrt(self.error2 / self.weight2)
        return 0.0 if self.error2 == 0 else UNBOUNDED


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassError:
    """All quantized weights of one role."""

    role: str
    num_weights: int
    relative: float
    median: float
    worst: float
    worst_name: str


Sums = NDArray[np.float64]


class RowCollector:
    """Gathers the row sums of weights in whatever blocks and order they come; a weight is done with its last row."""

    def __init__(self) -> None:
        self._blocks: dict[str, list[tuple[Sums, Sums]]] = {}
        self._errors: dict[str, WeightError] = {}

    @property
    def errors(self) -> list[WeightError]:
        """Of the weights that are done, by name."""
        return [self._errors[name] for name in sorted(self._errors)]

    def error(self, name: str) -> WeightError:
        """Of a weight that is done."""
        return self._errors[name]

    def restore(self, errors: Iterable[WeightError]) -> None:
        """Of weights that were done before."""
        self._errors |= {error.name: error for error in errors}

    def add(self, name: str, role: str, num_rows: int, error2_R: Sums, weight2_R: Sums) -> None:
        """A block of rows of a weight that has ``num_rows`` in all."""
        blocks = self._blocks.setdefault(name, [])
        blocks.append((error2_R, weight2_R))
        if sum(len(block[0]) for block in blocks) == num_rows:
            self._errors[name] = WeightError(
                name=name,
                role=role,
                error2=math.fsum(value for block in blocks for value in block[0].tolist()),
                weight2=math.fsum(value for block in blocks for value in block[1].tolist()),
            )
            del self._blocks[name]


def class_errors(errors: Iterable[WeightError]) -> tuple[ClassError, ...]:
    """Totals by role, in order of name."""
    by_role: dict[str, list[WeightError]] = {}
    for error in errors:
        by_role.setdefault(error.role, []).append(error)
    return tuple(_class_error(role, members) for role, members in sorted(by_role.items()))


def _class_error(role: str, members: list[WeightError]) -> ClassError:
    worst = min(members, key=lambda error: (-error.relative, error.name))
    weight2 = math.fsum(error.weight2 for error in members)
    error2 = math.fsum(error.error2 for error in members)
    return ClassError(
        role=role,
        num_weights=len(members),
        relative=math.sqrt(error2 / weight2) if weight2 else 0.0,
        median=statistics.median(error.relative for error in members),
        worst=worst.relative,
        worst_name=worst.name,
    )
