"""The ranks of a pipeline stage: weights, pool and overhead, and the bar that shows them."""

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.engines.parallel import Shares
from quantkit.families.config_values import integer
from quantkit.families.kv_shape import LatentKv
from quantkit.memory.budget import BUFFERS, Band, Budget, Server
from quantkit.memory.copies import copied_bytes, draft_ends_bytes, load_transient_bytes
from quantkit.memory.kv_cache import KvCell, KvFormat, kv_cell
from quantkit.memory.kv_choice import page_tokens
from quantkit.memory.model import Model
from quantkit.memory.plan import GIB, Demand, MemoryRequest, Segment, StagePlan
from quantkit.memory.scheme import Scheme
from quantkit.memory.sglang_budget import default_requests, sglang_budget
from quantkit.memory.tensor_groups import TensorGroup
from quantkit.memory.vllm_budget import vllm_budget
from quantkit.memory.weights import RankWeights, Stage, rank_weights

_VIT_L = 24 * 1024**2  # layers x hidden^2
# heads a rank that AMD's latent-attention kernels take
_AITER_HEADS = (16, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A model and how it is served, with everything decided that the request left open."""

    model: Model
    request: MemoryRequest
    scheme: Scheme
    groups: tuple[TensorGroup, ...]
    kv_format: KvFormat
    demand: Demand
    shares: Shares


def plan_stage(serving: Serving, stage: Stage) -> StagePlan:
    """Of every rank of one stage."""
    request, shape = serving.request, serving.model.kv_shape
    weights = rank_weights(serving.groups, stage, serving.shares, with_mtp=request.with_mtp)
    cell = kv_cell(shape, serving.kv_format, stage, request.parallel, request.engine, with_mtp=request.with_mtp)
    copies_gib = (
        copied_bytes(serving.groups, shape, stage, request.parallel, request.engine, with_mtp=request.with_mtp) / GIB
    )
    draft_gib = _draft_ends_gib(serving, stage)
    fixed_gib = weights.num_bytes / GIB + copies_gib
    budget, loaded = _budget(serving, fixed_gib, draft_gib, float(cell.num_bytes))
    transient_gib = 0.0
    if serving.scheme.experts == "int4":
        transient_gib = load_transient_bytes(weights.largest_layer_expert_bytes, request.engine) / GIB
    page = page_tokens(shape, request.engine, request.gpu.architecture, serving.kv_format.dtype)
    low, mid, high = (_tokens(gib, cell, page) for gib in (budget.pool.low, budget.pool.mid, budget.pool.high))
    return StagePlan(
        stage=stage,
        weights=weights,
        copies_gib=copies_gib,
        loaded=loaded,
        cell=cell,
        budget=budget,
        # copies are made when all weights are there and repacked
        load_peak_gib=weights.num_bytes / GIB + max(transient_gib, copies_gib) + draft_gib,
        num_tokens=(low, mid, high),
        free_gib=max(_left_gib(serving, loaded.mid, budget), 0.0),
        segments=tuple(_segments(serving, weights, loaded.mid, budget, cell)),
    )


def _budget(serving: Serving, fixed_gib: float, draft_gib: float, cell_bytes: float) -> tuple[Budget, Band]:
    """The engine's budget, and what is loaded when it sizes the pool."""
    server = server_of(serving)
    fixed = Band(low=fixed_gib, mid=fixed_gib, high=fixed_gib)
    if server.engine == "vllm":
        return vllm_budget(server, fixed), fixed
    loaded = fixed + BUFFERS
    # SGLang sizes the pool while the draft still holds an embedding and a head of its own
    draft = Band(low=draft_gib, mid=draft_gib, high=draft_gib)
    return sglang_budget(server, loaded + draft, cell_bytes), loaded


def planned_requests(serving: Serving, num_tokens: int) -> str | None:
    """What the server must be told where it is asked for more requests than SGLang runs of its own accord."""
    server = server_of(serving)
    asked = serving.demand.per_replica if serving.demand.tokens else 0
    if server.engine != "sglang" or server.max_running_requests is not None:
        return None
    default = default_requests(server, num_tokens)
    if asked <= default:
        return None
    total = default * server.parallel.dp_attention
    return f"started with --max-running-requests {serving.demand.concurrency}: SGLang's default is {total}"


def server_of(serving: Serving) -> Server:
    model, request = serving.model, serving.request
    is_latent = isinstance(model.kv_shape, LatentKv)
    vision = model.vision_count("num_hidden_layers") * model.vision_count("hidden_size") ** 2
    heads = integer(model.text_config, "num_attention_heads") // request.parallel.attention_tp
    is_sparse = isinstance(model.kv_shape, LatentKv) and model.kv_shape.is_sparse
    return Server(
        engine=request.engine,
        gpu=request.gpu,
        parallel=request.parallel,
        context=serving.demand.context,
        is_latent=is_latent,
        fraction=request.fraction,
        role=request.role,
        is_eager=request.is_eager,
        with_mtp=request.with_mtp,
        uses_aiter=request.gpu.architecture.is_amd and not is_sparse and (not is_latent or heads in _AITER_HEADS),
        vision_complexity=vision / _VIT_L if vision else None,
        concurrency=serving.demand.per_replica if serving.demand.tokens else 1,
        max_running_requests=request.max_running_requests,
    )


def _draft_ends_gib(serving: Serving, stage: Stage) -> float:
    if not (serving.request.with_mtp and stage.is_last and serving.model.kv_shape.num_mtp_layers):
        return 0.0
    text = serving.model.text_config
    return draft_ends_bytes(integer(text, "vocab_size"), integer(text, "hidden_size"), serving.request.parallel) / GIB


def _tokens(pool_gib: float, cell: KvCell, page: int) -> int:
    tokens = int(max(pool_gib, 0.0) * GIB / float(cell.num_bytes))
    return tokens - tokens % page


def _left_gib(serving: Serving, loaded_gib: float, budget: Budget) -> float:
    gpu = serving.request.gpu
    return gpu.total_gib - gpu.context_gib - loaded_gib - max(budget.pool.mid, 0.0) - budget.overhead.mid


def _segments(
    serving: Serving, weights: RankWeights, loaded_gib: float, budget: Budget, cell: KvCell
) -> Iterator[Segment]:
    gpu = serving.request.gpu
    parts = sorted(weights.parts, key=lambda part: -part.num_bytes)
    yield from (Segment(name=part.part.value, kind="weights", gib=part.num_bytes / GIB) for part in parts)
    yield Segment(name="copies and buffers", kind="copies", gib=loaded_gib - weights.num_bytes / GIB)
    pool_gib = max(budget.pool.mid, 0.0)
    used_gib = serving.demand.tokens * float(cell.num_bytes) / GIB
    if used_gib:
        yield Segment(name="KV cache, asked for", kind="kv_used", gib=used_gib)
    if pool_gib > used_gib:
        yield Segment(name="KV cache, spare" if used_gib else "KV cache", kind="kv_spare", gib=pool_gib - used_gib)
    yield Segment(name="overhead", kind="overhead", gib=budget.overhead.mid)
    yield Segment(name="context and NCCL", kind="context", gib=gpu.context_gib)
    taken_gib = loaded_gib + max(pool_gib, used_gib) + budget.overhead.mid + gpu.context_gib
    if taken_gib < gpu.total_gib:
        yield Segment(name="free", kind="free", gib=gpu.total_gib - taken_gib)
