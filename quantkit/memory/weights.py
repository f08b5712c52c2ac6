"""Bytes of weights on the ranks of one pipeline stage, by part."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from quantkit.engines.parallel import Shares
from quantkit.families.family import Role
from quantkit.memory.placement import place_group
from quantkit.memory.stage import Stage
from quantkit.memory.tensor_groups import TensorGroup


class Part(StrEnum):
    """What a plan tells apart; the MTP layer is one part, whatever is in it."""

    EXPERTS = "experts"
    SHARED = "shared"
    ATTENTION = "attention"
    INDEXER = "indexer"
    DENSE = "dense"
    ROUTER = "router"
    NORMS = "norms"
    EMBEDDING_AND_HEAD = "embedding_and_head"
    VISION = "vision"
    MTP = "mtp"
    OTHER = "other"


_PART_OF: Mapping[Role, Part] = {
    Role.ROUTED_EXPERT: Part.EXPERTS,
    Role.SHARED_EXPERT: Part.SHARED,
    Role.DENSE_MLP: Part.DENSE,
    Role.ATTENTION: Part.ATTENTION,
    Role.KV_B: Part.ATTENTION,
    Role.KV_SCALE: Part.ATTENTION,
    Role.INDEXER: Part.INDEXER,
    Role.INDEXER_FIXED: Part.INDEXER,
    Role.ROUTER: Part.ROUTER,
    Role.ROUTER_BIAS: Part.ROUTER,
    Role.EMBEDDING: Part.EMBEDDING_AND_HEAD,
    Role.HEAD: Part.EMBEDDING_AND_HEAD,
    Role.NORM: Part.NORMS,
    Role.VISION: Part.VISION,
    Role.MTP_PROJECTION: Part.MTP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWeights:
    """Bytes of one part on one rank: cut or dealt out over the ranks, and the same on all of them."""

    part: Part
    sharded_bytes: int
    replicated_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.sharded_bytes + self.replicated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """``largest_layer_expert_bytes``: routed experts of the layer that has the most."""

    parts: tuple[PartWeights, ...]
    largest_layer_expert_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def replicated_bytes(self) -> int:
        return sum(part.replicated_bytes for part in self.parts)


def rank_weights(groups: Mapping[int | None, tuple[TensorGroup, ...]], stage: Stage, shares: Shares) -> RankWeights:
    """Of every rank of a stage, from groups by layer: they hold equally much.

    An embedding and a head of the MTP layer's own are not counted: engines let it share the model's.
    """
    sharded: Counter[Part] = Counter()
    replicated: Counter[Part] = Counter()
    experts_of: Counter[int | None] = Counter()
    for group in stage.held(groups):
        place = group.place
        is_mtp = place.layer is not None and place.layer >= stage.num_layers
        if is_mtp and place.role in (Role.EMBEDDING, Role.HEAD):
            continue
        placed = place_group(group, shares)
        part = Part.MTP if is_mtp else _PART_OF.get(place.role, Part.OTHER)
        (replicated if placed.is_replicated else sharded)[part] += placed.num_bytes
        if place.role is Role.ROUTED_EXPERT:
            experts_of[place.layer] += placed.num_bytes
    parts = (
        PartWeights(part=part, sharded_bytes=sharded[part], replicated_bytes=replicated[part])
        for part in Part
        if sharded[part] or replicated[part]
    )
    return RankWeights(parts=tuple(parts), largest_layer_expert_bytes=max(experts_of.values(), default=0))
