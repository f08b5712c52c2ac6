"""`quantkit relayout`: the same INT4 in another layout."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options as opt
from quantkit.cli.recipe_options import RecipeOptions


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("relayout")(relayout)


def relayout(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="A checkpoint that is INT4 already: a directory, a hub id or a recipe.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to create.")],
    format_: Annotated[
        str, typer.Option("--format", metavar="compressed-tensors|w4afp8", help="How INT4 is laid out in OUT.")
    ],
    activations: opt.ActivationsOption = None,
    stats: opt.StatsOption = None,
    rest: opt.RestOption = None,
    mtp: opt.MtpOption = None,
    engine: opt.ServingEngineOption = None,
    allow_unservable: opt.AllowUnservableOption = False,
    allow_incomplete: opt.AllowIncompleteOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only plan.")] = False,
    resume: opt.ResumeOption = True,
    jobs: opt.JobsOption = None,
    quiet: opt.QuietOption = False,
    as_json: opt.JsonOption = False,
    summary: opt.SummaryOption = None,
) -> None:
    """Move the codes, scales and zero points of INT4 into another layout, bit for bit: nothing is computed anew.

    Reads compressed-tensors, w4afp8, GPTQ, AWQ and auto-round. What is not INT4 is kept as --rest says. Exits with 2
    where the layout has no place for what is there.

    Example: quantkit relayout ./glm-5.2-w4afp8 ./glm-5.2-int4 --format compressed-tensors
    """
    from quantkit.checkpoint.output import check_target
    from quantkit.cli import render
    from quantkit.cli.planning import PlanRequest, check_servable, describe, engine_reports, plan_request
    from quantkit.cli.show_plan import show_plan
    from quantkit.cli.show_results import show_conversion
    from quantkit.convert.conversion import Conversion
    from quantkit.convert.convert import convert_checkpoint
    from quantkit.plan.resources import Workers, choose_jobs

    opt.check_engine_name(engine)
    options = RecipeOptions(
        layout=format_,
        activations=activations,
        stats=stats,
        rest=rest,
        mtp=mtp,
        engine=engine,
        allow_incomplete=allow_incomplete,
    )
    request = PlanRequest(source=source, options=options, only_moves=True)
    check_target(output, Path(source) if Path(source).is_dir() else None)
    resolved, made = plan_request(request)
    loading = engine_reports(made)
    check_servable(made, loading, is_allowed=allow_unservable)
    num_jobs = choose_jobs(jobs, None)
    if dry_run:
        described = describe(resolved, made, loading, Workers(num_jobs=num_jobs))
        show_plan(described, as_json=as_json, summary=summary)
        return
    with render.progress(is_quiet=quiet) as advance:
        conversion = Conversion(
            plan=made,
            target=output,
            num_jobs=num_jobs,
            provenance=resolved.provenance,
            repository=resolved.repository,
            resume=resume,
            report_progress=advance,
        )
        report = convert_checkpoint(conversion)
    show_conversion(report, None, is_new=True, as_json=as_json, summary=summary, command="relayout")
