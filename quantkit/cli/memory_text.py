"""Memory plans as tables and bars on a terminal."""

from collections.abc import Iterator, Sequence

from quantkit.cli import render
from quantkit.cli.memory_request import CheckedPlan, OverviewRow
from quantkit.engines.parallel import ENGINE_VERSIONS
from quantkit.memory.budget import GIB, Band
from quantkit.memory.launch import launch_flags
from quantkit.memory.make import NOT_WRITTEN_YET
from quantkit.memory.plan import MemoryPlan, StagePlan
from quantkit.memory.rules import RULES


def show_plan(plan: MemoryPlan) -> None:
    """Weights and memory of every stage, bars, verdict, and what was taken for granted."""
    request = plan.request
    role = "" if request.role == "both" else f", {request.role} pool"
    render.show_line(
        f"Memory plan: {plan.model}, {plan.scheme}{', with MTP' if request.with_mtp else ''}\n"
        f"{request.engine} {ENGINE_VERSIONS[request.engine]}{role}, {request.parallel.num_gpus} x {request.gpu.title} "
        f"({request.gpu.total_gib:g} GiB each)\nFlags: {launch_flags(request)}\n"
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
    whose = "its default" if budget.is_default else "as logged" if "fraction" in plan.request.logged else "as given"
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
        ["KV pool", _room(budget.pool.mid, " GiB"), _room_span(budget.pool), ""],
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


def _room(gib: float, unit: str = "") -> str:
    """Of a pool, which may be less than nothing."""
    return f"short by {-gib:.2f}{unit}" if gib < 0 else f"{gib:.2f}{unit}"


def _room_span(band: Band) -> str:
    if band.high < 0:
        return f"short by {-band.low:.2f} to {-band.high:.2f}"
    return f"{_room(band.low)} to {band.high:.2f}"


def show_check(checked: CheckedPlan) -> None:
    """The plan, every figure beside the log's, and what raises doubts."""
    show_plan(checked.plan)
    table = []
    for row in checked.rows:
        digits = 0 if row.unit in ("tokens", "B") else 3
        planned = "-" if row.planned is None else f"{row.planned:,.{digits}f}"
        percent = "-" if row.difference_percent is None else f"{row.difference_percent:+.2f}%"
        table.append([row.name, row.unit, planned, f"{row.measured:,.{digits}f}", percent, str(row.line)])
    served = f" of {checked.log_model}" if checked.log_model else ""
    render.show_table(
        f"Against the log{served}", ["figure", "unit", "planned", "measured", "difference", "line"], table
    )
    render.show_notes("doubt", checked.doubts)


def show_comparison(first: MemoryPlan, second: MemoryPlan) -> None:
    """Side by side, on the ranks that have the least, and what the second has more."""
    left, right = first.tightest, second.tightest
    pairs = [
        *_pairs_of_parts(left, right),
        ("all weights", left.weights_gib, right.weights_gib),
        ("copies", left.copies_gib, right.copies_gib),
        ("load peak", left.load_peak_gib, right.load_peak_gib),
        ("KV pool", left.budget.pool.mid, right.budget.pool.mid),
        ("overhead", left.budget.overhead.mid, right.budget.overhead.mid),
    ]
    rows = [[name, "GiB", _room(one), _room(two), f"{two - one:+.2f}"] for name, one, two in pairs]
    counts = [
        ("KV a token", "B", float(left.cell.num_bytes), float(right.cell.num_bytes)),
        ("KV tokens", "tokens", left.num_tokens.mid, right.num_tokens.mid),
        (
            f"requests of {first.demand.context:,} tokens",
            "requests",
            left.num_tokens.mid // first.demand.context,
            right.num_tokens.mid // second.demand.context,
        ),
    ]
    rows.append(["KV dtype", "", *(f"{plan.kv_format.dtype}, {plan.kv_format.layout}" for plan in (first, second)), ""])
    rows += [[name, unit, f"{one:,.10g}", f"{two:,.10g}", f"{two - one:+,.10g}"] for name, unit, one, two in counts]
    rows.append(["verdict", "", first.verdict.value, second.verdict.value, ""])
    request = first.request
    render.show_table(
        f"{first.model} on {request.parallel.num_gpus} x {request.gpu.title}, {request.engine}, a rank",
        ["what", "unit", str(first.scheme), str(second.scheme), "difference"],
        rows,
    )
    for plan in (first, second):
        if NOT_WRITTEN_YET in plan.assumptions:
            render.show_line(f"{plan.scheme}: {NOT_WRITTEN_YET}")


def _pairs_of_parts(left: StagePlan, right: StagePlan) -> Iterator[tuple[str, float, float]]:
    """GiB of every part that either has."""
    one, two = ({part.part.value: part.num_bytes / GIB for part in stage.weights.parts} for stage in (left, right))
    for part in dict.fromkeys((*one, *two)):
        yield part, one.get(part, 0.0), two.get(part, 0.0)


def show_overview(rows: Sequence[OverviewRow]) -> None:
    """A line for every recipe."""
    table = []
    for row in rows:
        plans = [plan for plan in (row.int4, row.published) if plan is not None]
        cells = [row.recipe, "-" if row.published is None else row.published.scheme.experts.upper()]
        for plan in (row.published, row.int4):
            if plan is None:
                cells += ["-", "-", "-"]
            else:
                cells += [f"{plan.tightest.weights_gib:.2f}", f"{plan.num_tokens.mid:,}", plan.verdict.value]
        dtypes = " ".join(dict.fromkeys(plan.kv_format.dtype.value for plan in plans)) or "-"
        table.append([*cells, dtypes, f"{float(plans[0].stages[0].cell.num_bytes):,.10g} B" if plans else "-"])
    plan = next((plan for row in rows for plan in (row.int4, row.published) if plan is not None), None)
    if plan is not None:
        request = plan.request
        context = "nothing asked for, contexts as the models allow"
        if not request.asks_for_nothing:
            tokens = "the model's full context" if request.context is None else f"{request.context:,} tokens"
            context = f"{request.concurrency or 1} x {tokens} asked for"
        render.show_line(
            f"Every recipe on {request.parallel.num_gpus} x {request.gpu.title}, {request.engine}, "
            f"{launch_flags(request)}; weights in GiB and tokens a rank, {context}\n"
        )
    columns = ["recipe", "published", "GiB", "tokens", "verdict", "INT4 GiB", "tokens", "verdict", "KV", "KV a token"]
    render.show_table("Recipes", columns, table)
    render.show_notes("not planned", sorted({row.problem for row in rows if row.problem}))
