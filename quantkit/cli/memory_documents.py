"""JSON documents of `memory-plan`; ``schemas/memory-plan.json`` says the same and is tested. GiB is 2^30 bytes."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from quantkit.cli.document import head
from quantkit.cli.memory_request import CheckedPlan, OverviewRow
from quantkit.engines.parallel import ENGINE_VERSIONS
from quantkit.memory.budget import GIB, Band
from quantkit.memory.doubts import Comparison
from quantkit.memory.launch import launch_flags
from quantkit.memory.plan import MemoryPlan, StagePlan, Verdict
from quantkit.memory.rules import RULES

_COMPARED = ("weights_gib", "kv_pool_gib", "kv_tokens", "requests_at_context", "overhead_gib", "load_peak_gib")


def plan_document(plan: MemoryPlan, *, allow_overcommit: bool = False) -> dict[str, Any]:
    """One plan; it failed where it does not fit, unless that is allowed."""
    request, budget = plan.request, plan.stages[0].budget
    return {
        **head("memory-plan", _status([plan], allow_overcommit)),
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
        "launch_flags": launch_flags(request),
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
            "fraction_from": "default" if budget.is_default else "log" if "fraction" in request.logged else "option",
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
        "ranks": [{"rank": rank, **_stage_document(plan, stage)} for rank, stage in plan.ranks],
        "kv_tokens": plan.num_tokens.mid,
        "requests_at_context": plan.requests_at_context,
        "verdict": plan.verdict.value,
        "reasons": list(plan.reasons),
        "advice": list(plan.advice),
        "assumptions": list(plan.assumptions),
    }


def _status(plans: Iterable[MemoryPlan], allow_overcommit: bool) -> str:
    is_failure = not allow_overcommit and any(plan.verdict is Verdict.DOES_NOT_FIT for plan in plans)
    return "failed" if is_failure else "ok"


def _stage_document(plan: MemoryPlan, stage: StagePlan) -> dict[str, Any]:
    """Every rank of a stage. ``kv_tokens`` are those of its own pool; the server holds what its least rank holds."""
    low, mid, high = stage.num_tokens
    budget = stage.budget
    return {
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


def comparison_document(first: MemoryPlan, second: MemoryPlan, *, allow_overcommit: bool = False) -> dict[str, Any]:
    """Two plans and what the second has more, on the rank that has the least."""
    plans = (first, second)
    one, other = (_stage_document(plan, plan.tightest) for plan in plans)
    return {
        **head("memory-plan", _status(plans, allow_overcommit)),
        "plans": [plan_document(plan, allow_overcommit=allow_overcommit) for plan in plans],
        "difference": {key: _whole(round(other[key] - one[key], 4)) for key in _COMPARED},
    }


def check_document(checked: CheckedPlan, *, allow_overcommit: bool = False) -> dict[str, Any]:
    """A plan with a log beside it."""
    rows = [_check_row(row) for row in checked.rows]
    return {
        **plan_document(checked.plan, allow_overcommit=allow_overcommit),
        "log_model": checked.log_model,
        "check": rows,
        "doubts": list(checked.doubts),
    }


def _check_row(row: Comparison) -> dict[str, Any]:
    planned = None if row.planned is None else _gib(row.planned)
    rounded = {"planned": planned, "measured": _gib(row.measured)}
    return {**asdict(row), **rounded, "difference_percent": _percent(row)}


def overview_document(rows: Sequence[OverviewRow]) -> dict[str, Any]:
    """Every recipe; that one does not fit is no failure."""

    def nested(plan: MemoryPlan | None) -> dict[str, Any] | None:
        return None if plan is None else plan_document(plan, allow_overcommit=True)

    return {
        **head("memory-plan"),
        "recipes": [
            {
                "recipe": row.recipe,
                "published": nested(row.published),
                "int4": nested(row.int4),
                "problem": row.problem,
            }
            for row in rows
        ],
    }


def _gib(value: float) -> float:
    return round(value, 4)


def _band(band: Band) -> list[float]:
    return [_gib(band.low), _gib(band.high)]


def _whole(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def _percent(row: Comparison) -> float | None:
    return None if row.difference_percent is None else round(row.difference_percent, 2)
