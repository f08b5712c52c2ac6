"""`quantkit memory-plan`: what fits on each rank, before anything is loaded."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from quantkit.cli import memory_options as mem
from quantkit.cli import options as opt
from quantkit.cli.groups import grouped


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("memory-plan")(grouped(memory_plan))


def memory_plan(
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="[MODEL]", help="A recipe (glm-5.2), a hub id (org/name[@revision]), a config.json or a directory."
        ),
    ] = None,
    *,
    options: mem.MemoryOptions,
    check: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--check", metavar="LOG", help="Compare with the start-up log of an engine; it tells the flags."),
    ] = None,
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--html", metavar="FILE", help="Write the plan as one HTML page, too."),
    ] = None,
    allow_overcommit: mem.OvercommitOption = False,
    as_json: opt.JsonOption = False,
    summary: opt.SummaryOption = None,
) -> None:
    """Say what fits on each rank: weights by part, KV pool and tokens, overhead, verdict. Exit 5 if it does not fit.

    MODEL is a recipe, a hub id, a config.json or a checkpoint directory; without it the checkpoint in this directory,
    and where there is none an overview of every recipe.

    Example: quantkit memory-plan glm-5.2 --to int4 --tp 8 --gpu h200 --kv-dtype fp8
    """
    from quantkit.cli.show_memory import MemoryOutput, show_memory

    output = MemoryOutput(html=html, as_json=as_json, allow_overcommit=allow_overcommit, summary=summary)
    show_memory(model, options.in_lower_case(), output, check=check)
