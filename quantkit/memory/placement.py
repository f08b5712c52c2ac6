"""Which share of a tensor a rank holds: the engines' sharding as one table.

Facts: SGLang 0.5.23 and vLLM 0.33 place the same tensors alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from quantkit.engines.parallel import Shares
from quantkit.families.family import Role
from quantkit.memory.tensor_groups import TensorGroup

Cut = Literal["rows", "columns"]

# by the module's last component; whatever is not here stands whole on every rank: q_a and kv_a (merged into one
# replicated projection), norms, router, indexer, eh_proj, the rest of a vision tower
_CUTS: Mapping[str, Cut] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "qkv_proj"), "rows"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"), "rows"),
    **dict.fromkeys(("o_proj", "down_proj", "w2"), "columns"),
    **dict.fromkeys(("embed_tokens", "lm_head", "head"), "rows"),
    **dict.fromkeys(("wqkv", "fc0"), "rows"),
    **dict.fromkeys(("wo", "fc1"), "columns"),
}
_VISION_MLP = ("fc0", "fc1")
_UNCUT_ROLES = frozenset({Role.ROUTER, Role.ROUTER_BIAS, Role.NORM, Role.INDEXER, Role.INDEXER_FIXED})


@dataclass(frozen=True, slots=True)
class Placed:
    """Bytes of a group on one rank. ``is_replicated``: every rank of the stage holds the same ones, however many."""

    num_bytes: int
    is_replicated: bool


def place_group(group: TensorGroup, shares: Shares) -> Placed:
    """What does not divide is rounded up, as an engine pads it."""
    shape, count = list(group.spec.shape), group.count
    is_expert = group.place.role is Role.ROUTED_EXPERT
    if is_expert and len(shape) == 3:  # experts in one tensor
        shape[0] = -(-shape[0] // shares.expert_groups)
    elif is_expert:
        count = -(-count // shares.expert_groups)
    dimension = _cut_dimension(group)
    if dimension is not None:
        shape[dimension] = -(-shape[dimension] // _ways(group, shares))
    num_bytes = count * prod(shape) * group.spec.dtype.num_bytes
    return Placed(num_bytes, is_replicated=dimension is None and not is_expert)


def _ways(group: TensorGroup, shares: Shares) -> int:
    """Ranks that the rows or columns of a tensor are cut over."""
    module, role = group.place.module, group.place.role
    if role is Role.ATTENTION and module in ("k_proj", "v_proj"):
        return shares.key_heads
    if role is Role.VISION:
        return shares.vision_mlp if module in _VISION_MLP else shares.vision_attention
    by_role = {
        Role.ROUTED_EXPERT: shares.experts,
        Role.SHARED_EXPERT: shares.shared,
        Role.DENSE_MLP: shares.dense,
        Role.EMBEDDING: shares.embedding,
        Role.HEAD: shares.head,
    }
    return by_role.get(role, shares.attention)


def _cut_dimension(group: TensorGroup) -> int | None:
    """None for what stands whole. A bias is cut with the rows and stands whole beside columns."""
    cut, num_dims = _CUTS.get(group.place.module), len(group.spec.shape)
    if cut is None or group.place.role in _UNCUT_ROLES or not group.has_matrix or num_dims == 0:
        return None
    if cut == "rows":
        return -2 if num_dims >= 2 else -1
    return -1 if num_dims >= 2 else None
