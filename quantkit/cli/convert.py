"""`quantkit convert`: the main job."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options as opt


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("convert")(convert)


def convert(
    source: opt.SourceArgument,
    to: opt.ToOption = None,
    output: opt.OutputOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only plan: the same as `quantkit plan`.")] = False,
    recipe: opt.RecipeOption = None,
    group_size: opt.GroupSizeOption = None,
    scales: opt.ScalesOption = None,
    signed_scales: opt.SignedOption = None,
    targets: opt.TargetsOption = None,
    ignore: opt.IgnoreOption = None,
    allow_unmatched: opt.AllowUnmatchedOption = False,
    allow_incomplete: opt.AllowIncompleteOption = False,
    resume: opt.ResumeOption = True,
    jobs: opt.JobsOption = None,
    quiet: opt.QuietOption = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Convert a checkpoint to INT4: plan, write, verify, publish.

    The output directory appears whole or not at all. A run that was stopped goes on with the same command.

    Example: quantkit convert ./GLM-5.2-FP8 --to int4 -o ./glm-5.2-int4
    """
    opt.check_to(to)
    from quantkit.checkpoint.output import check_target
    from quantkit.cli import render
    from quantkit.cli.planning import PlanRequest, plan_request, tensor_parallel
    from quantkit.cli.show_plan import show_plan
    from quantkit.cli.show_results import show_conversion
    from quantkit.convert.convert import convert_checkpoint
    from quantkit.machine import available_cores

    request = PlanRequest(
        source=source,
        recipe=recipe,
        group_size=group_size,
        scales=scales,
        signed_scales=signed_scales,
        targets=targets or (),
        ignore=ignore or (),
        allow_unmatched=allow_unmatched,
        allow_incomplete=allow_incomplete,
        headers_only=dry_run,
    )
    num_jobs = jobs or available_cores()
    if output is not None:
        check_target(output, Path(source) if source and Path(source).is_dir() else None)  # before anything is fetched
    resolved, made = plan_request(request)
    if dry_run:
        show_plan(made, tensor_parallel(resolved, made), num_jobs=num_jobs, as_json=as_json)
        return
    target = output or Path(f"{resolved.name}-int4")
    with render.progress("convert", is_quiet=quiet) as advance:
        report = convert_checkpoint(
            made,
            target,
            num_jobs=num_jobs,
            provenance=resolved.provenance,
            resume=resume,
            report_progress=advance,
        )
    show_conversion(report, as_json=as_json)
