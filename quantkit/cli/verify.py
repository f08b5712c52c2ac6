"""`quantkit verify`: is an output whole, undamaged, consistent and close to its source?"""

from pathlib import Path
from typing import Annotated, Optional

import typer

from quantkit.cli import options as opt
from quantkit.errors import VerificationError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify")(verify)


def verify(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The directory that a conversion made.")],
    source: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--source", metavar="SOURCE", help="Compare every value with this source."),
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Leave out whatever needs dequantizing.")] = False,
    jobs: opt.JobsOption = None,
    quiet: opt.QuietOption = False,
    as_json: opt.JsonOption = False,
    summary: opt.SummaryOption = None,
) -> None:
    """Check an output: hashes, sizes, index, tensors, config; with --source also every value.

    Exits with 4 when anything is wrong, with 3 when there is no such directory.

    Example: quantkit verify ./glm-5.2-int4 --source ./GLM-5.2-FP8
    """
    from quantkit.cli import render
    from quantkit.cli.show_results import show_verification
    from quantkit.machine import available_cores
    from quantkit.sources import resolve_source
    from quantkit.verify.verify import verify_output

    checkpoint = None if source is None else resolve_source(source).checkpoint
    with render.progress(is_quiet=quiet) as advance:
        report = verify_output(
            output,
            source=checkpoint,
            is_fast=fast,
            num_jobs=jobs or available_cores(),
            report_progress=advance,
        )
    show_verification(report, as_json=as_json, summary=summary)
    if not report.is_good:
        if not as_json:
            render.show_notes("quantkit", [report.first_error()])
        raise typer.Exit(VerificationError.exit_code)
