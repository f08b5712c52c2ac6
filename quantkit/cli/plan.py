"""`quantkit plan`: every decision and every byte, from headers alone."""

from functools import partial
from pathlib import Path
from typing import Annotated, Optional

import typer

from quantkit.cli import options as opt
from quantkit.cli.calibrated import StreamingOption
from quantkit.cli.groups import grouped
from quantkit.cli.recipe_options import RecipeOptions
from quantkit.errors import UsageError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(grouped(plan))


def plan(
    source: opt.OptionalSource = None,
    to: opt.ToOption = None,
    config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--config", metavar="FILE", help="Plan from a config.json, with no weights present."),
    ] = None,
    *,
    options: RecipeOptions,
    jobs: opt.JobsOption = None,
    spool_gib: opt.SpoolOption = None,
    as_json: opt.JsonOption = False,
    output: opt.RoomOption = None,
    streaming: StreamingOption = False,
    summary: opt.SummaryOption = None,
) -> None:
    """Say what a conversion would do: decisions, exact output bytes, disk and memory, legal TP sizes, warnings.

    Example: quantkit plan ./GLM-5.2-FP8 --to int4
    """
    opt.check_to(to)
    if streaming and options.method != "gptq":
        raise UsageError("--streaming is of --method gptq", remedy="add that, or leave --streaming out")
    from quantkit.cli.planning import PlanRequest, check_room, check_servable, describe, engine_reports, plan_request
    from quantkit.cli.show_plan import show_plan
    from quantkit.machine import available_cores
    from quantkit.plan.resources import Workers, choose_jobs

    request = PlanRequest(source=source, options=options, config=config)
    resolved, made = plan_request(request)
    loading = engine_reports(made)
    num_jobs = jobs or available_cores()
    if output is not None:
        num_jobs = choose_jobs(jobs, None)
        check_room(resolved, made, output, spool_bytes=opt.spool_bytes(spool_gib))
    described = describe(resolved, made, loading, Workers(num_jobs=num_jobs), streaming=True if streaming else None)
    show = partial(show_plan, described, as_json=as_json, summary=summary)
    if not as_json:  # of a refused plan JSON is one document, that of the refusal
        show()
    check_servable(made, loading, is_allowed=options.allow_unservable)
    if as_json:
        show()
