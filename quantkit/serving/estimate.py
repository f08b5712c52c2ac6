"""A decode step by its bytes alone: what a rank reads of FP8 and of INT4 weights, and how long that takes.

With E experts of which a token uses k, c requests at once touch E * (1 - (1 - k/E)^c) of them in a layer, if routing is
even. Real routing is skewed and touches fewer. Launches, activations, KV reads and communication are not in it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.errors import SourceError
from quantkit.families.config_values import integer
from quantkit.families.family import Role
from quantkit.memory.gpus import Gpu
from quantkit.memory.model import Model
from quantkit.memory.placement import place_group
from quantkit.memory.scheme import Scheme
from quantkit.memory.serving import MemoryRequest
from quantkit.memory.split import shares

# measured copy bandwidth of an H200 (4.3 TB/s) against its data sheet (4.8)
EFFICIENCY = 4.3 / 4.8
CONCURRENCIES = (1, 8, 16, 32, 64)
FP8 = Scheme(experts="fp8", rest="fp8")
_NOT_READ = frozenset({Role.EMBEDDING, Role.VISION})  # a row of it a token, or nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Of one rank: routed experts, and what every step reads beside them."""

    experts: float
    rest: float

    @property
    def all(self) -> float:
        return self.experts + self.rest


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """One concurrency. ``unique_experts``: of a layer; ``fp8`` and ``int4``: read in a step by a rank."""

    concurrency: int
    unique_experts: float
    fp8: RankBytes
    int4: RankBytes
    bandwidth: float

    @property
    def ratio(self) -> float:
        """How many times as fast INT4 would be if bytes were all."""
        return self.fp8.all / self.int4.all

    @property
    def experts_ratio(self) -> float:
        return self.fp8.experts / self.int4.experts if self.int4.experts else 1.0

    @property
    def fp8_seconds(self) -> float:
        return self.fp8.all / self.bandwidth

    @property
    def int4_seconds(self) -> float:
        return self.int4.all / self.bandwidth

    @property
    def saved_by_experts(self) -> float:
        """Seconds."""
        return (self.fp8.experts - self.int4.experts) / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """``int4``: the scheme of OUTPUT, compared with the same model in FP8. ``bandwidth``: with the efficiency in it."""

    gpu: Gpu
    int4: Scheme
    bandwidth: float
    num_experts: int
    experts_per_token: int
    steps: tuple[StepEstimate, ...]


def estimate(model: Model, request: MemoryRequest, concurrencies: Iterable[int]) -> Estimate:
    """Of OUTPUT's pool: the model as it will be stored against the same in FP8, on as many ranks.

    Raises SourceError where the config does not say how many experts a token uses.
    """
    int4 = request.scheme or model.scheme
    num_experts, chosen = model.family.num_experts(model.config), _experts_per_token(model)
    fp8_rank, int4_rank = (rank_bytes(model, replace(request, scheme=scheme)) for scheme in (FP8, int4))
    bandwidth = request.gpu.bandwidth * EFFICIENCY
    steps = []
    for count in sorted(set(concurrencies)):
        share = touched_share(num_experts, chosen, count)
        read = (RankBytes(experts=rank.experts * share, rest=rank.rest) for rank in (fp8_rank, int4_rank))
        fp8, as_int4 = read
        step = StepEstimate(
            concurrency=count, unique_experts=num_experts * share, fp8=fp8, int4=as_int4, bandwidth=bandwidth
        )
        steps.append(step)
    return Estimate(
        gpu=request.gpu,
        int4=int4,
        bandwidth=bandwidth,
        num_experts=num_experts,
        experts_per_token=chosen,
        steps=tuple(steps),
    )


def _experts_per_token(model: Model) -> int:
    """Routed experts that a token uses; 0 for a dense model."""
    if not model.family.num_experts(model.config):
        return 0
    found = integer(model.text_config, "num_experts_per_tok", 0)
    if not found:
        raise SourceError(
            "does not say how many experts a token uses (num_experts_per_tok)",
            file=CONFIG_NAME,
            remedy="leave --estimate out, or take config.json from the source again",
        )
    return found


def touched_share(num_experts: int, chosen: int, concurrency: int) -> float:
    """The share of a layer's experts that a step reads, if routing is even."""
    if not num_experts:
        return 0.0
    return 1.0 - (1.0 - chosen / num_experts) ** concurrency


def rank_bytes(model: Model, request: MemoryRequest) -> RankBytes:
    """As an engine places them; whether its kernels take such slices is not asked here."""
    assert request.scheme is not None
    cut = shares(model, request)
    experts = rest = 0
    for group in model.tensors(request.scheme):
        place = group.place
        if place.role in _NOT_READ or (place.layer is not None and place.layer >= model.num_layers):
            continue
        num_bytes = place_group(group, cut).num_bytes
        if place.role is Role.ROUTED_EXPERT:
            experts += num_bytes
        else:
            rest += num_bytes
    return RankBytes(experts=experts, rest=rest)


def rate_by_bytes(rate: float, concurrency: int, saved_seconds: float) -> float:
    """Tokens a second where FP8 was measured at ``rate`` and a step became shorter by these seconds alone."""
    return concurrency / (concurrency / rate - saved_seconds)
