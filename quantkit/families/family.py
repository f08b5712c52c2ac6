"""What an architecture is to this tool: which tensors it has and which part each of them plays.

Patterns and shapes only: no model is ever built.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from quantkit.families import config_values
from quantkit.families.config_values import Config
from quantkit.families.kv_shape import KvShape
from quantkit.registry import Registry
from quantkit.tensors import DType


class Role(StrEnum):
    """The part that a tensor plays; recipes choose by it."""

    ROUTED_EXPERT = "routed_expert"
    SHARED_EXPERT = "shared_expert"
    DENSE_MLP = "dense_mlp"
    ATTENTION = "attention"
    KV_B = "kv_b"
    INDEXER = "indexer"
    INDEXER_FIXED = "indexer_fixed"
    ROUTER = "router"
    ROUTER_BIAS = "router_bias"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    MTP_PROJECTION = "mtp_projection"
    VISION = "vision"
    KV_SCALE = "kv_scale"
    LINEAR = "linear"
    UNKNOWN = "unknown"


# what no engine loads as INT4, or what loses the model when it is
NEVER_QUANTIZED: frozenset[Role] = frozenset(
    {
        Role.ROUTER,
        Role.ROUTER_BIAS,
        Role.EMBEDDING,
        Role.HEAD,
        Role.NORM,
        Role.KV_B,
        Role.INDEXER_FIXED,
        Role.MTP_PROJECTION,
        Role.VISION,
        Role.KV_SCALE,
    }
)

# whose matrices are no Linear modules
NOT_LINEAR: frozenset[Role] = frozenset({Role.EMBEDDING, Role.NORM, Role.ROUTER_BIAS, Role.KV_SCALE})

# modules that both engines build without asking the config's quantization section
BUILT_WITHOUT_CONFIG: frozenset[Role] = NOT_LINEAR | {
    *(Role.ROUTER, Role.HEAD, Role.MTP_PROJECTION, Role.VISION, Role.UNKNOWN),
}

RolePatterns = tuple[tuple[re.Pattern[str], Role], ...]


class ExpectedTensor(NamedTuple):
    """A tensor of the architecture before any storage format: ``....up_proj.weight`` [out, in], BF16 or F32.

    ``is_fp8``: the family's FP8 checkpoints store it as FP8 blocks. ``optional``: checkpoints may lack it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    role: Role
    is_fp8: bool = False
    optional: bool = False


TensorList = Callable[[Config, str], Iterator[ExpectedTensor]]
KvShapeOf = Callable[[Config], KvShape]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture. ``tensors`` lists what a config stands for, or is None where that is not known.

    ``kv_shape`` reads from a text config what a token leaves in the KV cache; None where that is not known.
    ``stores_mtp_copies``: whether its MTP layer usually carries an embedding and a head of its own. No config
    says so; real headers win.
    """

    name: str
    model_types: tuple[str, ...]
    roles: RolePatterns
    tensors: TensorList | None
    ignore: tuple[str, ...]
    text_root: str = "model."
    kv_shape: KvShapeOf | None = None
    expert_dims: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stores_mtp_copies: bool = False

    @cached_property
    def fused_experts(self) -> Mapping[str, tuple[str, ...]]:
        """Leaf of a 3-D tensor [expert, out, in] to the projections stacked in it along ``out``, in order."""
        gate, up, down = self.expert_dims
        return {"gate_up_proj": (gate, up), "down_proj": (down,)}

    @property
    def is_known(self) -> bool:
        """Whether the tensors of this family are known from a config alone."""
        return self.tensors is not None

    def role_of(self, name: str) -> Role:
        """The role of a module, a tensor or a fused 3-D tensor, below any prefix; the first pattern wins."""
        for pattern, role in self.roles:
            if pattern.search(name):
                return role
        return Role.UNKNOWN

    def expected_tensors(self, config: Config, *, root: str | None = None) -> Iterator[ExpectedTensor]:
        """Every tensor that a checkpoint of this config holds or (``optional``) may hold.

        ``root`` replaces what stands before ``layers.N`` and ``embed_tokens``.
        """
        if self.tensors is not None:
            yield from self.tensors(config, self.text_root if root is None else root)

    def assumed_tensors(
        self, config: Config, *, root: str | None = None, mtp_copies: bool | None = None
    ) -> Iterator[ExpectedTensor]:
        """What a published checkpoint most likely holds, where only its config is at hand."""
        keep_copies = self.stores_mtp_copies if mtp_copies is None else mtp_copies
        for tensor in self.expected_tensors(config, root=root):
            if not tensor.optional or (keep_copies and tensor.role in (Role.EMBEDDING, Role.HEAD)):
                yield tensor

    def text_config(self, config: Config) -> Config:
        """The part of a config that describes the language model."""
        return config_values.text_config(config)

    def num_layers(self, config: Config) -> int:
        """Decoder layers without MTP; the first MTP layer has this index."""
        return config_values.integer(self.text_config(config), "num_hidden_layers", at_least=1)

    def num_mtp_layers(self, config: Config) -> int:
        """Draft layers that follow the decoder's."""
        return config_values.integer(self.text_config(config), "num_nextn_predict_layers", 0)

    def num_experts(self, config: Config) -> int:
        """Routed experts of a layer; 0 for a dense model."""
        text = self.text_config(config)
        spellings = ("n_routed_experts", "num_experts", "num_local_experts")
        return max(config_values.integer(text, key, 0) for key in spellings)

    def moe_width(self, config: Config) -> int | None:
        """Inner width of one routed expert (the columns of its ``down_proj``), or None without experts."""
        if not self.num_experts(config):
            return None
        text = self.text_config(config)
        key = "moe_intermediate_size" if "moe_intermediate_size" in text else "intermediate_size"
        return config_values.integer(text, key)


FAMILIES: Registry[Family] = Registry("model family")
