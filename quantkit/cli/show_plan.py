"""Shows a plan as JSON or as tables."""

from collections.abc import Sequence
from pathlib import Path

from quantkit.checkpoint.sidecars import EXPECTED_SKIPS
from quantkit.cli import documents, needs_text, render
from quantkit.cli.planning import PlanDescription
from quantkit.cli.show_importance import show_importance
from quantkit.cli.show_loading import show_loading
from quantkit.cli.summary_file import add_summary
from quantkit.engines.tensor_parallel import TpVerdict
from quantkit.machine import bytes_text
from quantkit.plan.plan import Plan
from quantkit.plan.resources import Workers, disk_bytes


def show_plan(described: PlanDescription, *, as_json: bool, summary: Path | None = None) -> None:
    """Everything that the plan decided, and what is to be known of it."""
    plan = described.plan
    document = documents.plan_document(described)
    add_summary(summary, document)
    if as_json:
        render.show_json(document)
        return
    _show_parts(plan)
    render.show_table(
        "Rules",
        ["rule", "action", "weights"],
        [[rule.rule, rule.action, render.count(rule.num_weights)] for rule in plan.rules],
    )
    if plan.importance is not None:
        show_importance(document["importance"], plan.importance.file.path)
    _show_totals(plan, described.workers)
    needs = document["needs"]["calibration"]
    if needs is not None:
        render.show_table(needs_text.needs_title(needs), needs_text.needs_columns(needs), needs_text.needs_rows(needs))
    _show_tp(described.tp, plan.recipe.group_size)
    for report in described.loading:
        show_loading(report)
    skipped = plan.checkpoint.sidecars.skipped
    render.show_notes("not copied", [f"{name}: {reason}" for name, reason in skipped if reason not in EXPECTED_SKIPS])
    render.show_notes("warning", plan.warnings)


def _show_parts(plan: Plan) -> None:
    rows = [
        [
            part.role.value,
            part.source,
            part.action.value,
            render.count(part.num_weights),
            render.count(part.num_elements),
            bytes_text(part.source_bytes),
            bytes_text(part.output_bytes),
        ]
        for part in plan.parts
    ]
    render.show_table(
        f"Plan: {plan.family}, recipe {plan.recipe.name}, INT4 groups of {plan.recipe.group_size}",
        ["part", "source", "action", "weights", "elements", "source size", "output size"],
        rows,
    )


def _show_totals(plan: Plan, workers: Workers) -> None:
    largest = max(plan.shards, key=lambda shard: shard.file_bytes)
    share = 100 * plan.int4_share
    source, size = plan.checkpoint, bytes_text(largest.file_bytes)
    rows = [
        ["source", f"{render.count(len(source.tensors))} tensors", bytes_text(source.num_bytes)],
        ["output", f"{render.count(plan.num_tensors)} tensors", bytes_text(plan.tensor_bytes)],
        ["", f"{plan.tensor_bytes:,} bytes", ""],
        ["in INT4", f"{share:.1f}% of the elements", ""],
        ["largest shard", *(["not known from a config", "-"] if source.is_assumed else [largest.name, size])],
        ["disk needed", "", bytes_text(disk_bytes(plan))],
        ["memory needed", f"{workers.num_jobs} workers", bytes_text(workers.memory_bytes(plan))],
    ]
    render.show_table("Totals", ["what", "", "size"], rows)


def _show_tp(verdicts: Sequence[TpVerdict], group_size: int) -> None:
    rows = [
        [str(verdict.tp), verdict.engine, verdict.status, ", ".join(verdict.kernels), verdict.reason]
        for verdict in verdicts
    ]
    render.show_table(
        f"Tensor parallel sizes (group {group_size})", ["TP", "engine", "verdict", "kernels", "why not"], rows
    )
