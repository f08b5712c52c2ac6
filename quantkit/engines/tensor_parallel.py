"""Over how many GPUs an INT4 checkpoint (W4A16, experts INT4, the rest BF16) can be split.

Tensor parallelism cuts the columns of ``down_proj``: a rank needs whole scale groups and kernel tiles.
Facts: SGLang 0.5.23 and vLLM 0.33, read in source.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from quantkit.families.config_values import Config, integer
from quantkit.families.family import Family

EngineName = Literal["sglang", "vllm"]
TpStatus = Literal["ok", "refused", "unknown"]

ENGINES: tuple[EngineName, ...] = ("sglang", "vllm")
TP_SIZES: tuple[int, ...] = (1, 2, 4, 8, 16, 32)

# families whose module classes were read in both engines
_ENGINE_RULES_KNOWN = frozenset({"glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32", "kimi_k25"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernel:
    """A W4A16 expert kernel: the groups it takes, and what widths per rank must be multiples of."""

    engine: EngineName
    name: str
    group_sizes: tuple[int, ...]
    width_multiple: int
    hidden_multiple: int


EXPERT_KERNELS: tuple[ExpertKernel, ...] = (
    # gate and up are [2 * width, hidden], down is [hidden, width]; Marlin tiles are 128 rows by 64 columns
    ExpertKernel(engine="sglang", name="marlin", group_sizes=(32, 64, 128), width_multiple=64, hidden_multiple=128),
    ExpertKernel(engine="sglang", name="triton", group_sizes=(32, 128), width_multiple=1, hidden_multiple=1),
    # pads the expert width with zeros up to a tile
    ExpertKernel(engine="vllm", name="marlin", group_sizes=(32, 64, 128), width_multiple=1, hidden_multiple=128),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TpVerdict:
    """One size in one engine. ``kernels``: what can run the experts; ``reason``: why not, or why not all."""

    tp: int
    engine: EngineName
    status: TpStatus
    kernels: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The numbers of a model that splitting depends on; ``width`` is 0 without experts."""

    heads: int
    key_heads: int
    hidden: int
    dense_width: int
    num_experts: int
    width: int
    group_size: int
    is_expert_parallel: bool

    def rank_width(self, tp: int) -> int:
        """Columns of an expert's ``down_proj`` on one rank."""
        return self.width if self.is_expert_parallel else self.width // tp


def legal_tp(
    *, family: Family, config: Config, group_size: int, expert_parallel: bool = False
) -> tuple[TpVerdict, ...]:
    """A verdict for each size and engine. With expert parallelism whole experts are dealt out and not cut."""
    if family.name not in _ENGINE_RULES_KNOWN:
        reason = f"how engines split the family {family.name!r} is not known"
        return tuple(
            TpVerdict(tp=tp, engine=engine, status="unknown", reason=reason) for tp in TP_SIZES for engine in ENGINES
        )
    text = family.text_config(config)
    heads = integer(text, "num_attention_heads", at_least=1)
    shape = _Shape(
        heads=heads,
        key_heads=integer(text, "num_key_value_heads", heads, at_least=1),
        hidden=integer(text, "hidden_size"),
        dense_width=integer(text, "intermediate_size"),
        num_experts=family.num_experts(config),
        width=family.moe_width(config) or 0,
        group_size=group_size,
        is_expert_parallel=expert_parallel,
    )
    return tuple(_verdict(shape, tp, engine) for tp in TP_SIZES for engine in ENGINES)


def legal_sizes(verdicts: Iterable[TpVerdict], engine: EngineName) -> tuple[int, ...]:
    """The sizes that one engine serves."""
    return tuple(verdict.tp for verdict in verdicts if verdict.engine == engine and verdict.status == "ok")


def _verdict(shape: _Shape, tp: int, engine: EngineName) -> TpVerdict:
    problem = _dense_problem(shape, tp) or (_expert_problem(shape, tp) if shape.width else "")
    if problem:
        return TpVerdict(tp=tp, engine=engine, status="refused", reason=problem)
    if not shape.width:
        return TpVerdict(tp=tp, engine=engine, status="ok")
    problems = {kernel.name: _kernel_problem(shape, tp, kernel) for kernel in EXPERT_KERNELS if kernel.engine == engine}
    kernels = tuple(name for name, text in problems.items() if not text)
    reason = "; ".join(f"{name} {text}" for name, text in problems.items() if text)
    return TpVerdict(tp=tp, engine=engine, status="ok" if kernels else "refused", kernels=kernels, reason=reason)


def _dense_problem(shape: _Shape, tp: int) -> str:
    """What stands against the split outside the experts, or nothing."""
    if shape.heads % tp:
        return f"{shape.heads} attention heads do not divide by {tp}"
    if shape.key_heads % tp and tp % shape.key_heads:
        return f"{shape.key_heads} key-value heads can be neither split nor repeated over {tp} ranks"
    if shape.dense_width % tp:
        return f"the dense MLP's width {shape.dense_width} does not divide by {tp}"
    return ""


def _expert_problem(shape: _Shape, tp: int) -> str:
    """What stands against the experts in every kernel, or nothing."""
    if shape.hidden % shape.group_size:
        return f"the hidden size {shape.hidden} is not a whole number of groups of {shape.group_size}"
    if shape.is_expert_parallel and shape.num_experts % tp:
        return f"{shape.num_experts} experts do not divide by {tp}"
    # the shared expert, and without expert parallelism the routed ones, are cut
    if shape.width % tp:
        return f"the expert width {shape.width} does not divide by {tp}"
    columns = shape.rank_width(tp)
    if columns % shape.group_size:
        share = f"{columns}" if shape.is_expert_parallel else f"{shape.width} / {tp} = {columns}"
        return f"down_proj has {share} columns per rank, not a whole number of groups of {shape.group_size}"
    return ""


def _kernel_problem(shape: _Shape, tp: int, kernel: ExpertKernel) -> str:
    columns = shape.rank_width(tp)
    if shape.group_size not in kernel.group_sizes:
        return f"takes groups of {' or '.join(map(str, kernel.group_sizes))}, not {shape.group_size}"
    if columns % kernel.width_multiple:
        return f"needs a multiple of {kernel.width_multiple} columns per rank, not {columns}"
    if shape.hidden % kernel.hidden_multiple:
        return f"needs a hidden size that is a multiple of {kernel.hidden_multiple}, not {shape.hidden}"
    return ""
