"""`quantkit convert`: the main job."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import calibrated, running
from quantkit.cli import options as opt
from quantkit.cli.convert_options import SmokeOptions, WorkOptions
from quantkit.cli.groups import grouped
from quantkit.cli.recipe_options import RecipeOptions


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("convert")(grouped(convert))


def convert(
    source: opt.SourceArgument,
    to: opt.ToOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Directory to create [default: ./NAME-int4]."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only plan: the same as `quantkit plan`.")] = False,
    *,
    options: RecipeOptions,
    work: WorkOptions,
    quiet: opt.QuietOption = False,
    as_json: opt.JsonOption = False,
    smoke: SmokeOptions,
    summary: opt.SummaryOption = None,
    tokens: running.TokenOptions,
    streaming: calibrated.StreamingOption = False,
) -> None:
    """Convert a checkpoint to INT4: plan, write, verify, put in place.

    The output directory appears whole or not at all. A run that was stopped goes on with the same command. Shards of a
    hub repository pass through a bounded spool. With --push-to the finished output is uploaded; where it is complete
    already, the same command goes on with the upload. A smoke run (--limit-shards, --layers) is planned and checked
    whole, marked as partial, and never published. With --method gptq or awq the model is run over --text or --tokens
    first, and what that chose lies in OUTPUT.words until the output is there.

    Example: quantkit convert ./GLM-5.2-FP8 --to int4 -o ./glm-5.2-int4
    """
    opt.check_to(to)
    from quantkit.cli.converting import ConvertRequest, Shown, show_converted, show_dry_run, show_share

    request = ConvertRequest(
        source=source,
        output=output,
        options=options,
        work=work,
        smoke=smoke,
        inputs=calibrated.Inputs(tokens=tokens, streaming=streaming),
        is_dry=dry_run,
    )
    shown = Shown(quiet=quiet, as_json=as_json, summary=summary)
    if dry_run:
        show_dry_run(request, shown)
    elif work.rank is not None:
        show_share(request, shown)
    else:
        show_converted(request, shown)
