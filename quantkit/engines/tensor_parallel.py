"""Over how many GPUs a checkpoint can be split.

Tensor parallelism cuts the columns of ``down_proj``: a rank needs whole scale groups or blocks, and kernel tiles.
Facts: SGLang 0.5.23 and vLLM 0.33, read in source.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from quantkit.engines.parallel import ENGINES, EngineName, Parallel, Shares, shares_of
from quantkit.engines.schemes import ExpertKind
from quantkit.families.config_values import Config, integer
from quantkit.families.family import Family

TpStatus = Literal["ok", "refused", "unknown"]

TP_SIZES: tuple[int, ...] = (1, 2, 4, 8, 16, 32)

# families whose module classes were read in both engines
_ENGINE_RULES_KNOWN = frozenset({"glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32", "kimi_k25"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernel:
    """An INT4 expert kernel: the kinds and groups it takes, and what widths per rank must be multiples of."""

    engine: EngineName
    name: str
    group_sizes: tuple[int, ...]
    width_multiple: int
    hidden_multiple: int
    kinds: tuple[ExpertKind, ...] = ("w4a16",)


_MARLIN = (32, 64, 128)
EXPERT_KERNELS: tuple[ExpertKernel, ...] = (
    # gate and up are [2 * width, hidden], down is [hidden, width]; Marlin tiles are 128 rows by 64 columns
    ExpertKernel(engine="sglang", name="marlin", group_sizes=_MARLIN, width_multiple=64, hidden_multiple=128),
    ExpertKernel(engine="sglang", name="triton", group_sizes=(32, 128), width_multiple=1, hidden_multiple=1),
    # pads the expert width with zeros up to a tile
    ExpertKernel(
        engine="vllm",
        name="marlin",
        group_sizes=_MARLIN,
        width_multiple=1,
        hidden_multiple=128,
        kinds=("w4a16", "zero points"),
    ),
    # FP8 activations: CUTLASS, whose groups are fixed
    ExpertKernel(
        engine="sglang",
        name="cutlass",
        group_sizes=(128,),
        width_multiple=128,
        hidden_multiple=128,
        kinds=("w4a8", "w4afp8"),
    ),
    ExpertKernel(
        engine="vllm",
        name="cutlass",
        group_sizes=(128,),
        width_multiple=256,
        hidden_multiple=256,
        kinds=("w4a8",),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What a rank needs whole numbers of: groups of INT4 experts, blocks of FP8 experts, blocks of other FP8 weights.

    None where weights are not stored so. ``kind``: of INT4 experts.
    """

    group_size: int | None = None
    kind: ExpertKind = "w4a16"
    expert_block: int | None = None
    rest_block: int | None = None


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
    num_shared: int
    head_rows: tuple[int, ...]  # of q_b, kv_b and o for one head, with latent attention


def legal_tp(
    *,
    family: Family,
    config: Config,
    group_size: int,
    rest_block: int | None = None,
    kind: ExpertKind = "w4a16",
    expert_parallel: bool = False,
) -> tuple[TpVerdict, ...]:
    """Of an INT4 checkpoint (experts INT4, the rest BF16 or in FP8 blocks): a verdict for each size and engine.

    With expert parallelism whole experts are dealt out and not cut.
    """
    storage = Storage(group_size=group_size, kind=kind, rest_block=rest_block)
    return tuple(
        split_verdict(
            family=family,
            config=config,
            parallel=Parallel(tp=tp, ep=tp if expert_parallel else 1),
            storage=storage,
            engine=engine,
        )
        for tp in TP_SIZES
        for engine in ENGINES
    )


def legal_sizes(verdicts: Iterable[TpVerdict], engine: EngineName) -> tuple[int, ...]:
    """The sizes that one engine serves."""
    return tuple(verdict.tp for verdict in verdicts if verdict.engine == engine and verdict.status == "ok")


def split_verdict(
    *, family: Family, config: Config, parallel: Parallel, storage: Storage, engine: EngineName
) -> TpVerdict:
    """Whether an engine serves a checkpoint split this way; 'unknown' for a family whose classes were not read."""
    tp = parallel.tp
    heads = integer(family.text_config(config), "num_attention_heads", 0)
    num_layers = family.num_layers(config) if parallel.pp > 1 else 1
    problem = next(_size_problems(parallel, num_layers, heads, engine), "")
    if problem:
        return TpVerdict(tp=tp, engine=engine, status="refused", reason=problem)
    if family.name not in _ENGINE_RULES_KNOWN:
        reason = f"how engines split the family {family.name!r} is not known"
        return TpVerdict(tp=tp, engine=engine, status="unknown", reason=reason)
    shape = _shape(family, config)
    problem = _attention_problem(shape, parallel, engine)
    if problem:
        return TpVerdict(tp=tp, engine=engine, status="refused", reason=problem)
    shares = shares_of(parallel, engine, family=family.name, num_kv_heads=shape.key_heads)
    problem = _dense_problem(shape, shares, storage) or (_expert_problem(shape, shares, storage) if shape.width else "")
    if problem:
        return TpVerdict(tp=tp, engine=engine, status="refused", reason=problem)
    if not shape.width or storage.group_size is None:
        return TpVerdict(tp=tp, engine=engine, status="ok")
    able, reason = _able_kernels(shape, shares, storage, engine)
    return TpVerdict(tp=tp, engine=engine, status="ok" if able else "refused", kernels=able, reason=reason)


def _able_kernels(shape: _Shape, shares: Shares, storage: Storage, engine: EngineName) -> tuple[tuple[str, ...], str]:
    """Kernels that can run the experts, and why others cannot."""
    assert storage.group_size is not None
    kernels = [kernel for kernel in EXPERT_KERNELS if kernel.engine == engine and storage.kind in kernel.kinds]
    if not kernels:
        return (), f"no kernel for experts of the kind {storage.kind}"
    problems = {kernel.name: _kernel_problem(shape, shares, storage.group_size, kernel) for kernel in kernels}
    reason = "; ".join(f"{name} {text}" for name, text in problems.items() if text)
    return tuple(name for name, text in problems.items() if not text), reason


def _shape(family: Family, config: Config) -> _Shape:
    text = family.text_config(config)
    heads = integer(text, "num_attention_heads", at_least=1)
    return _Shape(
        heads=heads,
        key_heads=integer(text, "num_key_value_heads", heads, at_least=1),
        hidden=integer(text, "hidden_size"),
        dense_width=integer(text, "intermediate_size"),
        num_experts=family.num_experts(config),
        width=family.moe_width(config) or 0,
        num_shared=integer(text, "n_shared_experts", 0),
        head_rows=_head_rows(text),
    )


def _head_rows(text: Config) -> tuple[int, ...]:
    if not integer(text, "kv_lora_rank", 0):
        return ()
    nope, rope = integer(text, "qk_nope_head_dim"), integer(text, "qk_rope_head_dim")
    value = integer(text, "v_head_dim")
    return nope + rope, nope + value, value


def _size_problems(parallel: Parallel, num_layers: int, heads: int, engine: EngineName) -> Iterator[str]:
    """What stands against the sizes themselves, whatever the model's classes; what follows a problem is not asked."""
    tp, ep, dcp = parallel.tp, parallel.ep, parallel.dcp
    if tp % parallel.dp_attention:
        yield f"{parallel.dp_attention} attention replicas do not divide TP {tp}"
    if tp % ep:
        yield f"EP {ep} does not divide TP {tp}"
    if engine == "vllm" and ep not in (1, tp):
        yield f"vLLM deals experts out to all {tp} ranks or to none, so EP is 1 or {tp}, not {ep}"
    if parallel.pp > num_layers:
        yield f"{num_layers} layers do not fill {parallel.pp} pipeline stages"
    if parallel.attention_tp % dcp:
        yield f"DCP {dcp} does not divide the {parallel.attention_tp} ranks that share attention"
    if heads % parallel.attention_tp:
        yield f"{heads} attention heads do not divide by {parallel.attention_tp}"


def _attention_problem(shape: _Shape, parallel: Parallel, engine: EngineName) -> str:
    """What stands against the split of heads, or nothing."""
    attention = parallel.attention_tp
    if shape.key_heads % attention and attention % shape.key_heads:
        return f"{shape.key_heads} key-value heads can be neither split nor repeated over {attention} ranks"
    return _dcp_problem(shape, parallel, engine) if parallel.dcp > 1 else ""


def _dcp_problem(shape: _Shape, parallel: Parallel, engine: EngineName) -> str:
    attention, dcp = parallel.attention_tp, parallel.dcp
    if shape.head_rows:
        return ""
    if engine == "sglang":
        return "SGLang's attention for this family does not use DCP"
    if attention <= shape.key_heads or dcp > attention // shape.key_heads:
        most = max(attention // shape.key_heads, 1)
        return f"{shape.key_heads} key-value heads on {attention} ranks leave DCP {most} at most, not {dcp}"
    if (shape.heads // shape.key_heads) % dcp:
        return f"{shape.heads // shape.key_heads} query heads a key-value head do not divide by DCP {dcp}"
    return ""


def _dense_problem(shape: _Shape, shares: Shares, storage: Storage) -> str:
    """What stands against the split of attention, the dense MLP and the shared expert, or nothing."""
    if shape.dense_width % shares.dense:
        return f"the dense MLP's width {shape.dense_width} does not divide by {shares.dense}"
    if storage.rest_block is None:
        return ""
    attention = ((f"attention ({rows} a head)", shape.heads * rows, shares.attention) for rows in shape.head_rows)
    for what, width, ways in (
        *attention,
        ("the dense MLP", shape.dense_width, shares.dense),
        ("the shared expert", shape.num_shared * shape.width, shares.shared),
    ):
        if width % ways == 0 and ways > 1 and width // ways % storage.rest_block:
            return (
                f"{what} has {width} / {ways} = {width // ways} columns per rank, not whole FP8 blocks of "
                f"{storage.rest_block}"
            )
    return ""


def _expert_problem(shape: _Shape, shares: Shares, storage: Storage) -> str:
    """What stands against the experts in every kernel, or nothing."""
    granule, words = 1, ""
    if storage.group_size is not None:
        granule, words = storage.group_size, "groups"
    elif storage.expert_block is not None:
        granule, words = storage.expert_block, "FP8 blocks"
    if shape.hidden % granule and words == "groups":
        return f"the hidden size {shape.hidden} is not a whole number of groups of {granule}"
    if shape.num_experts % shares.expert_groups:
        return f"{shape.num_experts} experts do not divide by {shares.expert_groups}"
    # the shared expert is cut even where the routed ones are dealt out
    ways = max(shares.experts, shares.shared)
    if shape.width % ways:
        return f"the expert width {shape.width} does not divide by {ways}"
    columns = shape.width // shares.experts
    if columns % granule and (words == "groups" or shares.experts > 1):
        share = f"{columns}" if shares.experts == 1 else f"{shape.width} / {shares.experts} = {columns}"
        return f"down_proj has {share} columns per rank, not a whole number of {words} of {granule}"
    return ""


def _kernel_problem(shape: _Shape, shares: Shares, group_size: int, kernel: ExpertKernel) -> str:
    columns = shape.width // shares.experts
    if group_size not in kernel.group_sizes:
        return f"takes groups of {' or '.join(map(str, kernel.group_sizes))}, not {group_size}"
    if columns % kernel.width_multiple:
        return f"needs a multiple of {kernel.width_multiple} columns per rank, not {columns}"
    if shape.hidden % kernel.hidden_multiple:
        return f"needs a hidden size that is a multiple of {kernel.hidden_multiple}, not {shape.hidden}"
    return ""
