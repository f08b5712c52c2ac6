"""`quantkit plan`: every decision and every byte, from headers alone."""

from functools import partial
from pathlib import Path
from typing import Annotated, Optional

import typer

from quantkit.cli import calibrated
from quantkit.cli import options as opt


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(plan)


def plan(
    source: opt.OptionalSource = None,
    to: opt.ToOption = None,
    config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--config", metavar="FILE", help="Plan from a config.json, with no weights present."),
    ] = None,
    recipe: opt.RecipeOption = None,
    group_size: opt.GroupSizeOption = None,
    method: calibrated.MethodOption = None,
    scales: opt.ScalesOption = None,
    signed_scales: opt.SignedOption = None,
    zero_points: opt.ZeroPointsOption = None,
    format_: opt.FormatOption = None,
    activations: opt.ActivationsOption = None,
    stats: opt.StatsOption = None,
    importance: opt.ImportanceOption = None,
    rest: opt.RestOption = None,
    mtp: opt.MtpOption = None,
    targets: opt.TargetsOption = None,
    ignore: opt.IgnoreOption = None,
    allow_unmatched: opt.AllowUnmatchedOption = False,
    allow_incomplete: opt.AllowIncompleteOption = False,
    engine: opt.ServingEngineOption = None,
    allow_unservable: opt.AllowUnservableOption = False,
    jobs: opt.JobsOption = None,
    spool_gib: opt.SpoolOption = None,
    as_json: opt.JsonOption = False,
    output: opt.RoomOption = None,
    summary: opt.SummaryOption = None,
) -> None:
    """Say what a conversion would do: decisions, exact output bytes, disk and memory, legal TP sizes, warnings.

    Example: quantkit plan ./GLM-5.2-FP8 --to int4
    """
    opt.check_to(to)
    from quantkit.cli.planning import (
        PlanRequest,
        check_room,
        check_servable,
        engine_reports,
        plan_request,
        tensor_parallel,
    )
    from quantkit.cli.show_plan import show_plan
    from quantkit.machine import available_cores
    from quantkit.plan.resources import Workers, choose_jobs

    request = PlanRequest(
        source=source,
        recipe=recipe,
        config=config,
        settings={
            "group_size": group_size,
            "method": method,
            "scales": scales,
            "signed_scales": signed_scales,
            "zero_points": zero_points,
            "layout": format_,
            "activations": activations,
            "rest": rest,
            "mtp": mtp,
        },
        stats=stats,
        importance=importance,
        engine=opt.check_engine_name(engine),
        targets=targets or (),
        ignore=ignore or (),
        allow_unmatched=allow_unmatched,
        allow_incomplete=allow_incomplete,
        headers_only=True,
    )
    resolved, made = plan_request(request)
    loading = engine_reports(made)
    num_jobs = jobs or available_cores()
    if output is not None:
        num_jobs = choose_jobs(jobs, None)
        check_room(resolved, made, output, spool_bytes=opt.spool_bytes(spool_gib))
    workers = Workers(num_jobs=num_jobs)
    show = partial(show_plan, made, tensor_parallel(resolved, made), loading, workers, as_json=as_json, summary=summary)
    if not as_json:  # of a refused plan JSON is one document, that of the refusal
        show()
    check_servable(made, loading, is_allowed=allow_unservable)
    if as_json:
        show()
