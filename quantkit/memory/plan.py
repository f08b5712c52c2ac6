"""The memory plan: every rank's weights, KV pool and overhead, and whether it fits. Data; ``make.py`` fills it in."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from quantkit.memory.budget import GIB, Band, Budget
from quantkit.memory.kv_cache import KvCell
from quantkit.memory.kv_format import KvFormat
from quantkit.memory.scheme import Scheme
from quantkit.memory.serving import Demand, MemoryRequest
from quantkit.memory.stage import Stage
from quantkit.memory.weights import RankWeights


class Verdict(StrEnum):
    """``tight``: it fits as expected and not at the worst end of the bands."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"

    @property
    def severity(self) -> int:
        """From 0 up; members stand from the best to the worst."""
        return list(Verdict).index(self)


class Tokens(NamedTuple):
    """That a pool holds at worst, as expected and at best."""

    low: int
    mid: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of the bar of a rank: weights, copies, kv_used, kv_spare, overhead, context or free."""

    name: str
    kind: str
    gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Every rank of one pipeline stage: they are alike.

    ``copies_gib``: weights that the engine keeps a second time. ``loaded``: what stands before the pool is made, with
    buffers. ``load_peak_gib``: the most that loading takes. ``num_tokens``: that the pool holds. ``free_gib``: beside
    all that; 0 where there is too little.
    """

    stage: Stage
    weights: RankWeights
    copies_gib: float
    loaded: Band
    cell: KvCell
    budget: Budget
    load_peak_gib: float
    num_tokens: Tokens
    free_gib: float
    segments: tuple[Segment, ...]

    @property
    def weights_gib(self) -> float:
        return self.weights.num_bytes / GIB

    @property
    def buffers(self) -> Band:
        """What engines were logged to hold beside weights and copies; nothing where the overhead counts it."""
        fixed_gib = self.weights_gib + self.copies_gib
        low, mid, high = (gib - fixed_gib for gib in (self.loaded.low, self.loaded.mid, self.loaded.high))
        return Band(low=low, mid=mid, high=high)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Complete. ``num_tokens``: of one attention replica, by the stage that holds the fewest."""

    model: str
    family: str
    weights_from: str
    scheme: Scheme
    request: MemoryRequest
    kv_format: KvFormat
    demand: Demand
    stages: tuple[StagePlan, ...]
    num_tokens: Tokens
    verdict: Verdict
    reasons: tuple[str, ...]
    advice: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def requests_at_context(self) -> int:
        """Requests of the context's length that the server holds at once, in all its attention replicas."""
        return self.num_tokens.mid // self.demand.context * self.request.parallel.dp_attention

    @property
    def tightest(self) -> StagePlan:
        """The stage whose ranks hold the fewest tokens: the server holds no more."""
        return min(self.stages, key=lambda stage: stage.num_tokens.mid)

    @property
    def ranks(self) -> Iterator[tuple[int, StagePlan]]:
        """Every GPU, stage by stage."""
        for stage in self.stages:
            for rank in range(self.request.parallel.tp):
                yield stage.stage.index * self.request.parallel.tp + rank, stage
