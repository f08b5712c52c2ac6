"""The ranks of a pipeline stage: weights, pool and overhead, and the bar that shows them."""

from collections.abc import Iterator

from quantkit.memory.budget import GIB, Band, Budget, exactly
from quantkit.memory.copies import copied_bytes
from quantkit.memory.engine_rules import EngineRules
from quantkit.memory.kv_cache import KvCell, kv_cell
from quantkit.memory.plan import Segment, StagePlan, Tokens
from quantkit.memory.serving import Serving
from quantkit.memory.stage import Stage
from quantkit.memory.weights import RankWeights, rank_weights


def plan_stage(serving: Serving, stage: Stage, rules: EngineRules) -> StagePlan:
    """Of every rank of one stage."""
    weights = rank_weights(serving.groups, stage, serving.shares)
    cell = kv_cell(serving, stage, rules)
    copies_gib = copied_bytes(serving, stage, rules) / GIB
    loaded = exactly(weights.num_bytes / GIB + copies_gib) + rules.buffers
    ends_gib = serving.ends_bytes / GIB if stage.num_mtp else 0.0
    at_sizing = loaded + exactly(ends_gib if rules.sizes_pool_with_draft_ends else 0.0)
    budget = rules.budget(serving, at_sizing, float(cell.num_bytes))
    pool, repacked_gib = budget.pool, 0.0
    if serving.scheme.experts == "int4":
        repacked_gib = float(weights.largest_layer_expert_bytes * rules.repacked_share) / GIB
    page = rules.page_tokens(serving)
    return StagePlan(
        stage=stage,
        weights=weights,
        copies_gib=copies_gib,
        loaded=loaded,
        cell=cell,
        budget=budget,
        # copies are made when all weights are there and repacked
        load_peak_gib=weights.num_bytes / GIB + max(repacked_gib, copies_gib) + ends_gib,
        num_tokens=Tokens(*(_tokens(gib, cell, page) for gib in (pool.low, pool.mid, pool.high))),
        free_gib=max(_left_gib(serving, loaded, budget), 0.0),
        segments=tuple(_segments(serving, weights, loaded.mid, budget, cell)),
    )


def _tokens(pool_gib: float, cell: KvCell, page: int) -> int:
    tokens = int(max(pool_gib, 0.0) * GIB / float(cell.num_bytes))
    return tokens - tokens % page


def _left_gib(serving: Serving, loaded: Band, budget: Budget) -> float:
    gpu = serving.gpu
    return gpu.total_gib - gpu.context_gib - loaded.mid - max(budget.pool.mid, 0.0) - budget.overhead.mid


def _segments(
    serving: Serving, weights: RankWeights, loaded_gib: float, budget: Budget, cell: KvCell
) -> Iterator[Segment]:
    gpu = serving.gpu
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
