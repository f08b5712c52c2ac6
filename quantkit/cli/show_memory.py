"""Shows memory plans as tables and bars, as JSON, and as an HTML page."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.cli import memory_documents as documents
from quantkit.cli import render
from quantkit.cli.memory_page import memory_page
from quantkit.cli.memory_request import (
    MemoryOptions,
    OverviewRow,
    plan_checked,
    plan_comparison,
    plan_one,
    plan_overview,
)
from quantkit.engines.parallel import ENGINE_VERSIONS
from quantkit.errors import ResourceError, UsageError
from quantkit.memory.budget import GIB, Band
from quantkit.memory.check import Comparison, doubts
from quantkit.memory.plan import MemoryPlan, StagePlan, Verdict
from quantkit.memory.resolve import resolve_model
from quantkit.memory.rules import RULES


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOutput:
    """Where a plan goes, and whether one that does not fit is an error."""

    html: Path | None
    as_json: bool
    allow_overcommit: bool


def show_memory(
    name: str | None, options: MemoryOptions, output: MemoryOutput, *, compare: str | None, check: Path | None
) -> None:
    """Plan and show; exit 5 where a plan does not fit, unless that is allowed."""
    if compare is not None and check is not None:
        raise UsageError("--compare and --check do not go together", remedy="leave one of them out")
    model = resolve_model(name)
    if model is None:
        if compare is not None or check is not None or output.html is not None:
            raise UsageError(
                "there is no checkpoint here, and the overview is not compared, checked or drawn",
                remedy="name a MODEL",
            )
        if options.scheme is not None or options.group_size is not None or options.rest is not None:
            raise UsageError("the overview shows every recipe as published and as INT4", remedy="name a MODEL")
        _show_overview(plan_overview(options), output)
        return
    if compare is not None:
        plans = plan_comparison(options, model, compare)
        _finish(documents.comparison_document(*plans), plans, output, lambda: _show_comparison(*plans))
    elif check is not None:
        checked = plan_checked(options, model, check)

        def show() -> None:
            _show_plan(checked.plan)
            _show_check(checked.rows, checked.log_model)
            render.show_notes("doubt", doubts(checked.rows))

        _finish(documents.check_document(checked), (checked.plan,), output, show)
    else:
        plan = plan_one(options, model)
        _finish(documents.plan_document(plan), (plan,), output, lambda: _show_plan(plan))


def _finish(document: dict[str, Any], plans: Sequence[MemoryPlan], output: MemoryOutput, show: Any) -> None:
    """Show in the form that was asked for, and leave with the exit code that the plans deserve."""
    bad = [plan for plan in plans if plan.verdict is Verdict.DOES_NOT_FIT]
    is_failure = bool(bad) and not output.allow_overcommit
    document["status"] = "failed" if is_failure else "ok"
    for plan, one in zip(plans, document.get("plans", ()), strict=False):
        one["status"] = "failed" if plan in bad and not output.allow_overcommit else "ok"
    if output.html is not None:
        _write_page(output.html, memory_page(document))
    if output.as_json:
        render.show_json(document)
    else:
        show()
    for plan in bad:
        render.show_notes("does not fit", [f"{plan.scheme}: {reason}" for reason in plan.reasons])
    if is_failure:
        sys.exit(ResourceError.exit_code)


def _write_page(path: Path, page: str) -> None:
    """Whole or not at all, over an older page and over nothing else."""
    if path.suffix.lower() not in (".html", ".htm") or path.is_symlink():
        raise UsageError(f"--html {path} is not the name of a page", remedy="give a file whose name ends in .html")
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(render.printable(page), encoding="utf-8", errors="replace")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written ({error.strerror})", remedy="give --html another file") from error


def _show_plan(plan: MemoryPlan) -> None:
    request = plan.request
    render.show_line(
        f"Memory plan: {plan.model}, {plan.scheme}{', with MTP' if request.with_mtp else ''}\n"
        f"{request.engine} {ENGINE_VERSIONS[request.engine]}, {request.parallel.flags(request.engine)}, "
        f"{request.parallel.num_gpus} x {request.gpu.title} ({request.gpu.total_gib:g} GiB each)\n"
    )
    for stage in plan.stages:
        where = _ranks(plan, stage)
        render.show_table(f"Weights, {where}", ["part", "sharded", "replicated", "GiB a rank"], _weight_rows(stage))
        render.show_table(f"Memory, {where}", ["what", "", "band", "how"], _memory_rows(plan, stage))
    render.show_bars(
        "GiB a rank",
        [(_ranks(plan, stage), [(one.name, one.kind, one.gib) for one in stage.segments]) for stage in plan.stages],
        total=request.gpu.total_gib,
    )
    for source in dict.fromkeys(stage.budget.overhead_source for stage in plan.stages):
        render.show_line(f"Overhead: {source}")
    render.show_line(f"Verdict: {plan.verdict}")
    for reason in plan.reasons:
        render.show_line(f"  {reason}")
    if plan.advice:
        render.show_line("What would help, each alone:")
    for advice in plan.advice:
        render.show_line(f"  {advice}")
    render.show_line("Taken for granted:")
    for assumption in plan.assumptions:
        render.show_line(f"  {assumption}")


def _ranks(plan: MemoryPlan, stage: StagePlan) -> str:
    tp, index = plan.request.parallel.tp, stage.stage.index
    first = index * tp
    ranks = f"ranks {first}-{first + tp - 1}" if tp > 1 else f"rank {first}"
    if len(plan.stages) == 1:
        return ranks
    return f"{ranks} (stage {index}: layers {stage.stage.first}-{stage.stage.last - 1})"


def _weight_rows(stage: StagePlan) -> list[list[str]]:
    parts = sorted(stage.weights.parts, key=lambda part: -part.num_bytes)
    rows = [
        [part.part.value, *map(_gib, (part.sharded_bytes, part.replicated_bytes, part.num_bytes))] for part in parts
    ]
    whole = stage.weights.replicated_bytes
    return [*rows, ["all", *map(_gib, (stage.weights.num_bytes - whole, whole, stage.weights.num_bytes))]]


def _gib(num_bytes: int) -> str:
    return "<0.01" if 0 < num_bytes < GIB / 200 else f"{num_bytes / GIB:.2f}"


def _memory_rows(plan: MemoryPlan, stage: StagePlan) -> list[list[str]]:
    budget, demand = stage.budget, plan.demand
    low, mid, high = stage.num_tokens
    option = RULES[plan.request.engine].fraction_option
    whose = "its default" if budget.is_default else "as given"
    return [
        ["weights", f"{stage.weights_gib:.2f} GiB", "", "of the checkpoint"],
        ["copies", f"{stage.copies_gib:.2f} GiB", "", _what_is_copied(plan, stage)],
        ["buffers", f"{stage.buffers.mid:.2f} GiB", _span(stage.buffers), "logged beside weights and copies"],
        ["load peak", f"{stage.load_peak_gib:.2f} GiB", "", "weights and the layer being repacked, or the copies"],
        ["KV a token", f"{float(stage.cell.num_bytes):,.10g} B", "", stage.cell.formula],
        [
            "KV dtype",
            plan.kv_format.dtype.value,
            "",
            f"{plan.kv_format.layout} rows, chosen by {plan.kv_format.chosen_by}",
        ],
        ["fraction", f"{budget.fraction:.3f}", "", f"{option}, {whose}: {budget.rule}"],
        ["KV pool", f"{budget.pool.mid:.2f} GiB", _span(budget.pool), ""],
        ["KV tokens", f"{mid:,}", f"{low:,} to {high:,}", ""],
        [
            "requests",
            f"{mid // demand.context:,}",
            f"{low // demand.context:,} to {high // demand.context:,}",
            f"of {demand.context:,} tokens at once{_on_all_replicas(plan)}",
        ],
        [
            "overhead",
            f"{budget.overhead.mid:.2f} GiB",
            _span(budget.overhead),
            "activations, graphs, tables: see below",
        ],
        ["free", f"{stage.free_gib:.2f} GiB", "", "beside all that"],
    ]


def _what_is_copied(plan: MemoryPlan, stage: StagePlan) -> str:
    if not stage.copies_gib:
        return ""
    gathered = ", and what gathers queries over DCP" if plan.request.parallel.dcp > 1 else ""
    return f"kv_b_proj in BF16, as latent attention wants it{gathered}"


def _on_all_replicas(plan: MemoryPlan) -> str:
    replicas = plan.request.parallel.dp_attention
    if replicas == 1:
        return ""
    tokens = plan.num_tokens.mid * replicas
    return f" on a replica; {plan.requests_at_context:,} on all {replicas}, {tokens:,} tokens in all"


def _span(band: Band) -> str:
    return f"{band.low:.2f} to {band.high:.2f}"


def _show_check(rows: Sequence[Comparison], log_model: str) -> None:
    table = []
    for row in rows:
        digits = 0 if row.unit in ("tokens", "B") else 3
        planned = "-" if row.planned is None else f"{row.planned:,.{digits}f}"
        percent = "-" if row.difference_percent is None else f"{row.difference_percent:+.2f}%"
        table.append([row.name, row.unit, planned, f"{row.measured:,.{digits}f}", percent, str(row.line)])
    served = f" of {log_model}" if log_model else ""
    render.show_table(
        f"Against the log{served}", ["figure", "unit", "planned", "measured", "difference", "line"], table
    )


def _show_comparison(first: MemoryPlan, second: MemoryPlan) -> None:
    left, right = (documents.least_rank(documents.plan_document(plan)) for plan in (first, second))
    rows = []
    parts = dict.fromkeys((*left["weights_by_part_gib"], *right["weights_by_part_gib"]))
    pairs = [
        (part, left["weights_by_part_gib"].get(part, 0.0), right["weights_by_part_gib"].get(part, 0.0))
        for part in parts
    ]
    pairs += [(name, left[key], right[key]) for name, key in (("all weights", "weights_gib"), ("copies", "copies_gib"))]
    pairs += [
        (name, left[key], right[key])
        for name, key in (("load peak", "load_peak_gib"), ("KV pool", "kv_pool_gib"), ("overhead", "overhead_gib"))
    ]
    rows = [[name, "GiB", f"{one:.2f}", f"{two:.2f}", f"{two - one:+.2f}"] for name, one, two in pairs]
    for name, key in (("KV bytes a token", "kv_bytes_per_token"), ("KV tokens", "kv_tokens")):
        rows.append([name, "", f"{left[key]:,}", f"{right[key]:,}", f"{right[key] - left[key]:+,}"])
    requests = "requests_at_context"
    rows.append(
        [
            f"requests of {first.demand.context:,} tokens",
            "",
            f"{left[requests]:,}",
            f"{right[requests]:,}",
            f"{right[requests] - left[requests]:+,}",
        ]
    )
    rows.append(["verdict", "", first.verdict.value, second.verdict.value, ""])
    request = first.request
    render.show_table(
        f"{first.model} on {request.parallel.num_gpus} x {request.gpu.title}, {request.engine}, a rank",
        ["what", "unit", str(first.scheme), str(second.scheme), "difference"],
        rows,
    )


def _show_overview(rows: Sequence[OverviewRow], output: MemoryOutput) -> None:
    if output.as_json:
        render.show_json(documents.overview_document(rows))
        return
    table = []
    for row in rows:
        cells = [row.recipe]
        for plan in (row.published, row.int4):
            if plan is None:
                cells += ["-", "-", "-"]
                continue
            stage = plan.tightest
            cells += [f"{stage.weights_gib:.2f}", f"{plan.num_tokens.mid:,}", plan.verdict.value]
        cell = next((plan.stages[0].cell for plan in (row.int4, row.published) if plan is not None), None)
        table.append([*cells, "-" if cell is None else f"{float(cell.num_bytes):,.10g} B"])
    plan = next((plan for row in rows for plan in (row.int4, row.published) if plan is not None), None)
    if plan is not None:
        request = plan.request
        render.show_line(
            f"Every recipe on {request.parallel.num_gpus} x {request.gpu.title}, {request.engine}, "
            f"{request.parallel.flags(request.engine)}; GiB and tokens a rank, contexts as the models allow\n"
        )
    columns = ["recipe", "published", "tokens", "verdict", "INT4", "tokens", "verdict", "KV a token"]
    render.show_table("Recipes", columns, table)
    render.show_notes("not planned", sorted({row.problem for row in rows if row.problem}))
