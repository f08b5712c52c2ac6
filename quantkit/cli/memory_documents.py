"""JSON documents of `memory-plan`; ``schemas/memory-plan.json`` says the same and is tested. GiB is 2^30 bytes."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from quantkit.cli.document import head
from quantkit.cli.memory_request import CheckedPlan, OverviewRow
from quantkit.engines.parallel import ENGINE_VERSIONS
from quantkit.memory.budget import GIB, Band
from quantkit.memory.check import Comparison, doubts
from quantkit.memory.plan import MemoryPlan, StagePlan
from quantkit.memory.rules import RULES

_COMPARED = ("weights_gib", "kv_pool_gib", "kv_tokens", "requests_at_context", "overhead_gib", "load_peak_gib")


def plan_document(plan: MemoryPlan) -> dict[str, Any]:
    """One plan."""
    request, budget = plan.request, plan.stages[0].budget
    return {
        **head("memory-plan"),
        "model": plan.model,
        "family": plan.family,
        "weights_from": plan.weights_from,
        "scheme": str(plan.scheme),
        "storage": asdict(plan.scheme),
        "with_mtp": request.with_mtp,
        "engine": request.engine,
        "engine_title": RULES[request.engine].title,
        "engine_version": ENGINE_VERSIONS[request.engine],
        "role": request.role,
        "gpu": {
            "name": request.gpu.name,
            "title": request.gpu.title,
            "total_gib": request.gpu.total_gib,
            "free_before_load_gib": _gib(request.gpu.free_before_load_gib),
        },
        "parallel": {
            "tp": request.parallel.tp,
            "ep": request.parallel.ep,
            "pp": request.parallel.pp,
            "dp_attention": request.parallel.dp_attention,
            "dcp": request.parallel.dcp,
            "gpus": request.parallel.num_gpus,
            "flags": request.parallel.flags(request.engine),
        },
        "budget": {
            "fraction": round(budget.fraction, 4),
            "fraction_option": RULES[request.engine].fraction_option,
            "is_default_fraction": budget.is_default,
            "limit_gib": _gib(budget.limit_gib),
            "rule": budget.rule,
        },
        "kv": {
            "dtype": plan.kv_format.dtype.value,
            "layout": plan.kv_format.layout.value,
            "chosen_by": plan.kv_format.chosen_by,
            "formula": plan.stages[0].cell.formula,
        },
        "demand": {
            "context": plan.demand.context,
            "concurrency": plan.demand.concurrency,
            "per_replica": plan.demand.per_replica,
            "tokens": plan.demand.tokens,
        },
        "ranks": [rank_document(plan, rank, stage) for rank, stage in plan.ranks],
        "kv_tokens": plan.num_tokens.mid,
        "requests_at_context": plan.requests_at_context,
        "verdict": plan.verdict.value,
        "reasons": list(plan.reasons),
        "advice": list(plan.advice),
        "assumptions": list(plan.assumptions),
    }


def rank_document(plan: MemoryPlan, rank: int, stage: StagePlan) -> dict[str, Any]:
    """One rank. ``kv_tokens`` are those of its own pool; the whole server holds what its least rank holds."""
    low, mid, high = stage.num_tokens
    budget = stage.budget
    return {
        "rank": rank,
        "stage": stage.stage.index,
        "layers": [stage.stage.first, stage.stage.last],
        "weights_gib": _gib(stage.weights_gib),
        "weights_by_part_gib": {part.part.value: _gib(part.num_bytes / GIB) for part in stage.weights.parts},
        "replicated_gib": _gib(stage.weights.replicated_bytes / GIB),
        "replicated_by_part_gib": {
            part.part.value: _gib(part.replicated_bytes / GIB) for part in stage.weights.parts if part.replicated_bytes
        },
        "copies_gib": _gib(stage.copies_gib),
        "buffers_gib": _gib(stage.buffers.mid),
        "buffers_band_gib": _band(stage.buffers),
        "kv_bytes_per_token": _whole(float(stage.cell.num_bytes)),
        "kv_formula": stage.cell.formula,
        "kv_pool_gib": _gib(budget.pool.mid),
        "kv_pool_band_gib": _band(budget.pool),
        "kv_tokens": mid,
        "kv_tokens_band": [low, high],
        "requests_at_context": mid // plan.demand.context,
        "overhead_gib": _gib(budget.overhead.mid),
        "overhead_band_gib": _band(budget.overhead),
        "overhead_source": budget.overhead_source,
        "load_peak_gib": _gib(stage.load_peak_gib),
        "free_gib": _gib(stage.free_gib),
        "segments": [
            {"name": segment.name, "kind": segment.kind, "gib": _gib(segment.gib)} for segment in stage.segments
        ],
    }


def comparison_document(first: MemoryPlan, second: MemoryPlan) -> dict[str, Any]:
    """Two plans and what the second has more, on the rank that has the least."""
    plans = [plan_document(first), plan_document(second)]
    ranks = [least_rank(document) for document in plans]
    difference = {key: _whole(round(ranks[1][key] - ranks[0][key], 4)) for key in _COMPARED}
    return {**head("memory-plan"), "plans": plans, "difference": difference}


def check_document(checked: CheckedPlan) -> dict[str, Any]:
    """A plan with a log beside it."""
    rows = [_check_row(row) for row in checked.rows]
    return {
        **plan_document(checked.plan),
        "log_model": checked.log_model,
        "check": rows,
        "doubts": list(doubts(checked.rows)),
    }


def _check_row(row: Comparison) -> dict[str, Any]:
    planned = None if row.planned is None else _gib(row.planned)
    rounded = {"planned": planned, "measured": _gib(row.measured)}
    return {**asdict(row), **rounded, "difference_percent": _percent(row)}


def overview_document(rows: Sequence[OverviewRow]) -> dict[str, Any]:
    """Every recipe."""
    return {
        **head("memory-plan"),
        "recipes": [
            {
                "recipe": row.recipe,
                "published": None if row.published is None else plan_document(row.published),
                "int4": None if row.int4 is None else plan_document(row.int4),
                "problem": row.problem,
            }
            for row in rows
        ],
    }


def least_rank(document: dict[str, Any]) -> dict[str, Any]:
    """The rank whose pool holds the fewest tokens."""
    least: dict[str, Any] = min(document["ranks"], key=lambda rank: rank["kv_tokens"])
    return least


def _gib(value: float) -> float:
    return round(value, 4)


def _band(band: Band) -> list[float]:
    return [_gib(band.low), _gib(band.high)]


def _whole(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def _percent(row: Comparison) -> float | None:
    return None if row.difference_percent is None else round(row.difference_percent, 2)
