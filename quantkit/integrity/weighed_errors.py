"""Errors of quantized weights as their inputs see them: squared, and weighed by the second moments of the channels.

Measured on the first rows of each weight, and again as the search without importance would have made them: what the
file has gained. A weight's moments count as shares of their sum, so that no layer speaks for the others.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quantkit.integrity.weight_errors import WeightError

SAMPLE_ROWS = 16

Sums = NDArray[np.float64]


class WeighedSums(NamedTuple):
    """Per row: squared error, the same without importance, and squared weight."""

    error2_R: Sums
    plain2_R: Sums
    weight2_R: Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedError:
    """Of one weight."""

    name: str
    error2: float
    plain2: float
    weight2: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassGain:
    """Of all weights of one role that have moments: relative errors with importance and without."""

    role: str
    num_weights: int
    relative: float
    plain: float


class WeighedCollector:
    """Gathers row sums in whatever blocks and order they come; added exactly, so that no split changes a digit."""

    def __init__(self) -> None:
        self._blocks: dict[str, list[WeighedSums]] = {}
        self._errors: dict[str, WeighedError] = {}

    def add(self, name: str, sums: WeighedSums) -> None:
        """Of a block of a weight's first rows."""
        self._blocks.setdefault(name, []).append(sums)

    def restore(self, errors: Iterable[WeighedError]) -> None:
        """Of weights that were done before."""
        self._errors |= {error.name: error for error in errors}

    def finish(self, names: Iterable[str]) -> tuple[WeighedError, ...]:
        """Of weights whose rows have all come; those without moments are left out."""
        done = {name: _sum(name, self._blocks.pop(name)) for name in names if name in self._blocks}
        self._errors |= done
        return tuple(done.values())

    def gains(self, errors: Iterable[WeightError]) -> tuple[ClassGain, ...]:
        """Totals by role, in order of name. ``errors``: of all quantized weights, for their roles."""
        by_role: dict[str, list[WeighedError]] = {}
        for error in errors:
            if error.name in self._errors:
                by_role.setdefault(error.role, []).append(self._errors[error.name])
        return tuple(_gain(role, members) for role, members in sorted(by_role.items()))


def _sum(name: str, blocks: list[WeighedSums]) -> WeighedError:
    error2, plain2, weight2 = (
        math.fsum(value for block in blocks for value in block[kind].tolist()) for kind in range(3)
    )
    return WeighedError(name=name, error2=error2, plain2=plain2, weight2=weight2)


def _gain(role: str, members: list[WeighedError]) -> ClassGain:
    weight2 = math.fsum(one.weight2 for one in members)
    error2, plain2 = math.fsum(one.error2 for one in members), math.fsum(one.plain2 for one in members)
    return ClassGain(
        role=role,
        num_weights=len(members),
        relative=math.sqrt(error2 / weight2) if weight2 else 0.0,
        plain=math.sqrt(plain2 / weight2) if weight2 else 0.0,
    )
