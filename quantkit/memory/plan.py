"""The memory plan: every rank's weights, KV pool and overhead, and whether it fits. Data; ``make.py`` fills it in."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from quantkit.engines.parallel import EngineName, Parallel
from quantkit.memory.budget import Band, Budget, Role
from quantkit.memory.gpus import Gpu
from quantkit.memory.kv_cache import KvCell, KvDtype, KvFormat, KvLayout
from quantkit.memory.scheme import Scheme
from quantkit.memory.weights import RankWeights, Stage

GIB = 2**30


class Verdict(StrEnum):
    """``tight``: it fits as expected and not at the worst end of the bands."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """How a model is to be served; None means what the model or the engine says.

    ``context``: tokens a request, as the server is started with; ``concurrency``: requests at once, on all ranks.
    """

    gpu: Gpu
    engine: EngineName = "sglang"
    parallel: Parallel = field(default_factory=Parallel)
    scheme: Scheme | None = None
    fraction: float | None = None
    kv_dtype: KvDtype | None = None
    kv_layout: KvLayout | None = None
    role: Role = "both"
    with_mtp: bool = False
    is_eager: bool = False
    context: int | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is to be served by one attention replica: ``tokens`` is 0 where nothing was asked for."""

    context: int
    concurrency: int
    tokens: int


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
    buffers. ``load_peak_gib``: the most that loading takes. ``num_tokens``: that the pool holds at worst, as expected
    and at best.
    """

    stage: Stage
    weights: RankWeights
    copies_gib: float
    loaded: Band
    cell: KvCell
    budget: Budget
    load_peak_gib: float
    num_tokens: tuple[int, int, int]
    segments: tuple[Segment, ...]

    @property
    def weights_gib(self) -> float:
        return self.weights.num_bytes / GIB

    @property
    def free_gib(self) -> float:
        """What is left beside everything else; 0 where there is too little."""
        return sum(segment.gib for segment in self.segments if segment.kind == "free")


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
    num_tokens: tuple[int, int, int]
    verdict: Verdict
    reasons: tuple[str, ...]
    advice: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def requests_at_context(self) -> int:
        """Requests of the context's length that all replicas hold at once."""
        return self.num_tokens[1] // self.demand.context * self.request.parallel.dp_attention

    @property
    def ranks(self) -> Iterator[tuple[int, StagePlan]]:
        """Every GPU, stage by stage."""
        for stage in self.stages:
            for rank in range(self.request.parallel.tp):
                yield stage.stage.index * self.request.parallel.tp + rank, stage
