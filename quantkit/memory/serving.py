"""How a model is to be served: what was asked for, and the same with everything decided that was left open."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from quantkit.engines.parallel import DEFAULT_ENGINE, EngineName, Parallel, Shares
from quantkit.engines.tensor_parallel import TpVerdict
from quantkit.families.config_values import integer
from quantkit.families.kv_shape import KvShape, LatentKv
from quantkit.memory.gpus import Gpu
from quantkit.memory.kv_format import KvDtype, KvFormat, KvLayout, PoolRole
from quantkit.memory.model import Model
from quantkit.memory.scheme import Scheme
from quantkit.memory.tensor_groups import TensorGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """How a model is to be served; None means what the model or the engine says.

    ``context``: tokens a request, as the server is started with; ``concurrency``: requests at once, on all ranks.
    ``role``: of a pool in disaggregated serving, or both. ``is_eager``: without CUDA graphs. ``logged``: fields
    that are a server's log's and no option's; its fraction is what the engine has made of what it was given.
    """

    gpu: Gpu
    engine: EngineName = DEFAULT_ENGINE
    parallel: Parallel = field(default_factory=Parallel)
    scheme: Scheme | None = None
    fraction: float | None = None
    kv_dtype: KvDtype | None = None
    kv_layout: KvLayout | None = None
    role: PoolRole = "both"
    with_mtp: bool = False
    is_eager: bool = False
    context: int | None = None
    concurrency: int | None = None
    max_running_requests: int | None = None
    logged: frozenset[str] = frozenset()

    @property
    def asks_for_nothing(self) -> bool:
        """Whether nothing says what must fit: then the verdict is about the server's start."""
        return self.context is None and self.concurrency is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is to be served: ``concurrency`` requests in all, ``per_replica`` on each attention replica.

    ``tokens``: of a replica; 0 where nothing was asked for.
    """

    context: int
    concurrency: int
    per_replica: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Everything decided: what the stages, the budgets and the verdict are made from.

    ``split``: the engine's verdict on the sizes, which is no refusal. ``groups``: by layer, None outside the layers.
    """

    model: Model
    request: MemoryRequest
    scheme: Scheme
    split: TpVerdict
    groups: Mapping[int | None, tuple[TensorGroup, ...]]
    kv_format: KvFormat
    demand: Demand
    shares: Shares

    @property
    def gpu(self) -> Gpu:
        return self.request.gpu

    @property
    def parallel(self) -> Parallel:
        return self.request.parallel

    @property
    def kv_shape(self) -> KvShape:
        return self.model.kv_shape

    @property
    def is_latent(self) -> bool:
        return isinstance(self.kv_shape, LatentKv)

    @property
    def is_sparse(self) -> bool:
        """Whether attention reads the tokens that an indexer chooses."""
        return self.kv_shape.is_sparse

    @property
    def heads_per_rank(self) -> int:
        return integer(self.model.text_config, "num_attention_heads") // self.parallel.attention_tp

    @property
    def ends_bytes(self) -> int:
        """Embedding and head in 16 bits, on one rank, as a draft layer is built with them."""
        text = self.model.text_config
        matrix = integer(text, "vocab_size") * integer(text, "hidden_size") * 2
        return -(-matrix // self.shares.embedding) + -(-matrix // self.shares.head)
