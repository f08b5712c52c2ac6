"""How an engine spreads a model over GPUs: over how many ranks each kind of weight is cut.

Facts: SGLang 0.5.23 and vLLM 0.33, read in source.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

EngineName = Literal["sglang", "vllm"]
ENGINES: tuple[EngineName, ...] = ("sglang", "vllm")
DEFAULT_ENGINE: EngineName = "sglang"
ENGINE_VERSIONS: dict[EngineName, str] = {"sglang": "0.5.23", "vllm": "0.33.0"}
MOST_GPUS = 4096

# vLLM's class for these never lets a rank keep a whole shared expert
_SHARED_EXPERT_ALWAYS_CUT = frozenset({"glm4_moe"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """``tp`` GPUs share every layer, ``pp`` stages follow each other: ``tp * pp`` GPUs.

    Inside the ``tp``: ``ep`` groups of experts, ``dp_attention`` replicas of attention with requests of their own,
    ``dcp`` slices of every request's KV cache. vLLM calls ``tp / dp_attention`` its tensor parallel size.
    """

    tp: int = 8
    ep: int = 1
    pp: int = 1
    dp_attention: int = 1
    dcp: int = 1

    @property
    def attention_tp(self) -> int:
        """GPUs that share one replica of attention."""
        assert self.tp % self.dp_attention == 0, self
        return self.tp // self.dp_attention

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp

    def flags(self, engine: EngineName) -> str:
        """As the engine's command line spells it."""
        return " ".join(self.flags_of(engine).values())

    def flags_of(self, engine: EngineName) -> dict[str, str]:
        """The flag of each size; those of 1 are left out, but for ``tp``."""
        if engine == "sglang":
            sizes = {"tp": f"--tp-size {self.tp}", "pp": f"--pp-size {self.pp}", "ep": f"--ep-size {self.ep}"}
            sizes |= {"dp_attention": f"--attn-dp-size {self.dp_attention}", "dcp": f"--dcp-size {self.dcp}"}
        else:
            sizes = {"tp": f"--tensor-parallel-size {self.attention_tp}", "pp": f"--pipeline-parallel-size {self.pp}"}
            sizes |= {"dp_attention": f"--data-parallel-size {self.dp_attention}"}
            sizes |= {"dcp": f"--decode-context-parallel-size {self.dcp}", "ep": "--enable-expert-parallel"}
        return {field: words for field, words in sizes.items() if field == "tp" or getattr(self, field) > 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Ranks that each kind of weight is cut over; ``expert_groups``: ranks or groups that experts are dealt out to.

    ``vision_attention`` and ``vision_mlp``: a vision tower's matrices.
    """

    attention: int
    key_heads: int
    dense: int
    shared: int
    embedding: int
    head: int
    experts: int
    expert_groups: int
    vision_attention: int
    vision_mlp: int


def shares_of(
    parallel: Parallel, engine: EngineName, *, family: str, num_kv_heads: int, num_vision_heads: int = 0
) -> Shares:
    """``num_kv_heads`` is cut down to one head a rank, and repeated from there on. Sizes have been checked."""
    assert parallel.tp % parallel.ep == 0, parallel
    attention = parallel.attention_tp
    # a vision tower whose heads do not divide stands whole
    vision = 1 if num_vision_heads % attention else attention
    key_heads = min(attention, num_kv_heads)
    if engine == "sglang":
        return Shares(
            attention=attention,
            key_heads=key_heads,
            dense=parallel.tp,
            shared=parallel.tp,
            embedding=attention,
            head=parallel.tp,
            experts=parallel.tp // parallel.ep,
            expert_groups=parallel.ep,
            vision_attention=vision,
            vision_mlp=1,
        )
    has_expert_parallel = parallel.ep > 1
    # with expert and data parallelism each rank computes the shared expert for its own slice of the tokens
    keeps_shared_whole = has_expert_parallel and parallel.dp_attention > 1 and family not in _SHARED_EXPERT_ALWAYS_CUT
    return Shares(
        attention=attention,
        key_heads=key_heads,
        dense=attention,
        shared=1 if keeps_shared_whole else attention,
        embedding=attention,
        head=attention,
        experts=1 if has_expert_parallel else parallel.tp,
        expert_groups=parallel.tp if has_expert_parallel else 1,
        vision_attention=vision,
        vision_mlp=vision,
    )


def stage_layers(num_layers: int, num_stages: int, engine: EngineName) -> tuple[tuple[int, int], ...]:
    """First layer and end of every pipeline stage. What does not divide: SGLang gives the last stages one more,
    vLLM the stages before the last."""
    base, extra = divmod(num_layers, num_stages)
    counts = [base] * num_stages
    for index in range(extra):
        counts[-1 - index if engine == "sglang" else -2 - index] += 1
    ends = accumulate(counts)
    return tuple((end - count, end) for end, count in zip(ends, counts, strict=True))
