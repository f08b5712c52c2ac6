"""Shows a plan of servers: memory of each pool, launch lines with their reasons, notes; or one template."""

import sys
from dataclasses import dataclass

from quantkit.cli import render
from quantkit.cli.serve_documents import serve_document
from quantkit.errors import ResourceError
from quantkit.memory.plan import Verdict
from quantkit.memory.rules import RULES
from quantkit.serving.estimate import CONCURRENCIES, EFFICIENCY, Estimate, estimate
from quantkit.serving.make import ServePlan, make_serve_plan
from quantkit.serving.pool import Pool
from quantkit.serving.request import ServeRequest
from quantkit.serving.templates import check_template, render_template
from quantkit.serving.templates.shell import array_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOutput:
    """What is printed, and whether a pool that does not fit is an error."""

    template: str | None
    with_estimate: bool
    as_json: bool
    allow_overcommit: bool


def show_serving(request: ServeRequest, output: ServeOutput) -> None:
    """Plan and show; exit 5 where a pool does not fit, unless that is allowed. Then no template is printed."""
    check_template(output.template)
    plan = make_serve_plan(request)
    estimated = _estimate(plan) if output.with_estimate else None
    is_refused = not plan.fits and not output.allow_overcommit
    text = None if output.template is None or is_refused else render_template(output.template, plan)
    if output.as_json:
        template = None if output.template is None or text is None else {"kind": output.template, "text": text}
        document = serve_document(plan, estimated, template, allow_overcommit=output.allow_overcommit)
        render.show_json(document)
    elif text is not None:
        render.show_line(text.rstrip("\n"))
    elif output.template is None:
        _show(plan, estimated)
    for pool in plan.pools:
        if pool.plan.verdict is Verdict.DOES_NOT_FIT:
            found = [f"{pool.served.path} ({pool.role}): {reason}" for reason in pool.plan.reasons]
            render.show_notes("does not fit", found)
            render.show_notes("would help", pool.plan.advice)
    if is_refused:
        sys.exit(ResourceError.exit_code)


def _estimate(plan: ServePlan) -> Estimate:
    asked = plan.request.concurrency
    counts = CONCURRENCIES if asked is None else (*CONCURRENCIES, asked)
    pool = plan.pools[-1]
    return estimate(pool.served.model, pool.plan.request, counts)


def _show(plan: ServePlan, estimated: Estimate | None) -> None:
    render.show_table("Memory of every rank", ["what", *(pool.role for pool in plan.pools)], _memory_rows(plan))
    for server in plan.servers:
        gpus = f", {server.num_gpus} GPUs" if server.num_gpus else ""
        render.show_line(f"# {server.name}, on {server.host}{gpus}")
        name = server.name.replace("-", "_")
        render.show_line("\n".join(array_lines(name, server)))
        render.show_line(f'"${{{name}[@]}}"\n')
    if plan.agreed:
        render.show_line(f"Alike in both pools: {' '.join(one.name for one in plan.agreed)}\n")
    if estimated is not None:
        _show_estimate(estimated)
    render.show_notes("note", plan.notes)


def _memory_rows(plan: ServePlan) -> list[list[str]]:
    option = RULES[plan.request.engine].fraction_option
    columns = [_memory_column(pool) for pool in plan.pools]
    names = ["checkpoint", "weights", "GPUs", option, "weights GiB", "KV pool GiB", "KV dtype", "KV tokens"]
    names += ["context", "requests of it at once", "verdict"]
    return [[name, *cells] for name, *cells in zip(names, *columns, strict=True)]


def _memory_column(pool: Pool) -> list[str]:
    plan = pool.plan
    tightest, asked = plan.tightest, plan.request
    return [
        pool.served.path,
        str(pool.served.stored) + (", with MTP" if asked.with_mtp else ""),
        f"{asked.parallel.num_gpus} x {asked.gpu.title}",
        f"{tightest.budget.fraction:.3f}",
        f"{tightest.weights_gib:.2f}",
        f"{tightest.budget.pool.mid:.2f}",
        f"{plan.kv_format.dtype}, {plan.kv_format.layout} rows",
        render.count(plan.num_tokens.mid),
        render.count(plan.demand.context),
        render.count(plan.requests_at_context),
        plan.verdict.value,
    ]


def _show_estimate(found: Estimate) -> None:
    rows = [
        [
            str(one.concurrency),
            f"{one.unique_experts:.1f}",
            f"{one.fp8.experts / 1e9:.2f}",
            f"{one.int4.experts / 1e9:.2f}",
            f"{one.fp8.all / 1e9:.2f}",
            f"{one.int4.all / 1e9:.2f}",
            f"{1e3 * one.fp8_seconds:.2f}",
            f"{1e3 * one.int4_seconds:.2f}",
            f"{one.ratio:.2f}",
        ]
        for one in found.steps
    ]
    columns = ["requests", "experts touched", "FP8 experts GB", "INT4 experts GB", "FP8 all GB", "INT4 all GB"]
    render.show_table("Weights that a rank reads in a decode step", [*columns, "FP8 ms", "INT4 ms", "FP8 / INT4"], rows)
    render.show_line(
        f"{found.experts_per_token} of {found.num_experts} experts a token, evenly routed; {found.gpu.title}: "
        f"{found.gpu.bandwidth / 1e12:.2f} TB/s x {EFFICIENCY:.2f}; {found.int4}.\n"
        "A bound by bytes, no prediction: launches, skewed routing, KV reads and communication are not in it. At few "
        "requests a step is bound by launches, and bytes explain almost none of it.\n"
    )
