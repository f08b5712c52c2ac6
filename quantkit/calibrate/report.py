"""What a calibration saw, in short: from its statistics file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from quantkit.module_names import experts_in, layer_of
from quantkit.numerics.magnitudes import quantile
from quantkit.statistics.file import Statistics
from quantkit.statistics.names import HISTOGRAM, LARGEST, SECOND_MOMENT, TOKEN_COUNT, KvPart

QUANTILES = (0.99, 0.999, 0.9999)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCoverage:
    """Tokens that the experts of a layer saw. ``unvisited``: those that saw none."""

    experts: str
    num_experts: int
    least: int
    median: float
    most: int
    unvisited: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePart:
    """Magnitudes of one part of the KV cache of a layer, all rows together. ``quantiles``: as ``QUANTILES``."""

    attention: str
    part: KvPart
    num_rows: int
    largest: float
    quantiles: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateReport:
    """``num_linears``: modules outside the routed experts."""

    path: Path
    model: str
    tokens: str
    num_sequences: int
    length: int
    num_linears: int
    experts: tuple[ExpertCoverage, ...]
    cache: tuple[CachePart, ...]


def summarize(statistics: Statistics) -> CalibrateReport:
    """Of a file that `calibrate` wrote."""
    names = sorted(statistics.tensors, key=_in_order)
    moments = [name.removesuffix(SECOND_MOMENT) for name in names if name.endswith(SECOND_MOMENT)]
    return CalibrateReport(
        path=statistics.path,
        model=statistics.model,
        tokens=statistics.metadata.get("tokens", ""),
        num_sequences=int(statistics.metadata.get("num_sequences", "0")),
        length=int(statistics.metadata.get("sequence_length", "0")),
        num_linears=sum(experts_in(module) is None for module in moments),
        experts=tuple(_coverage(statistics, names)),
        cache=tuple(_cache(statistics, names)),
    )


def _in_order(name: str) -> tuple[int, str]:
    layer = layer_of(name)
    return (0 if layer is None else layer.number), name


def _coverage(statistics: Statistics, names: list[str]) -> Iterator[ExpertCoverage]:
    for name in names:
        experts = experts_in(name)
        if experts is None or name != f"{experts}{TOKEN_COUNT}":
            continue
        counts_E = statistics.read(name)
        yield ExpertCoverage(
            experts=experts,
            num_experts=len(counts_E),
            least=int(counts_E.min()),
            median=float(np.median(counts_E)),
            most=int(counts_E.max()),
            unvisited=tuple(np.flatnonzero(counts_E == 0).tolist()),
        )


def _cache(statistics: Statistics, names: list[str]) -> Iterator[CachePart]:
    for name in names:
        attention, _, part = name.removesuffix(HISTOGRAM).rpartition(".")
        if not name.endswith(HISTOGRAM) or part not in tuple(KvPart):
            continue
        histogram_RB = cast(NDArray[np.int64], statistics.read(name))
        largest = float(statistics.read(f"{attention}.{part}{LARGEST}").max())
        yield CachePart(
            attention=attention,
            part=KvPart(part),
            num_rows=len(histogram_RB),
            largest=largest,
            quantiles=tuple(min(quantile(histogram_RB.sum(0), fraction), largest) for fraction in QUANTILES),
        )
