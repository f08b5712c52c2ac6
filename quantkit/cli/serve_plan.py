"""`quantkit serve-plan`: complete launch lines of a deployment, checked against contract and memory plan."""

from typing import Annotated

import typer

from quantkit.cli import memory_options as mem
from quantkit.cli import options as opt
from quantkit.cli.groups import grouped
from quantkit.cli.serve_options import ServeOptions


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve-plan")(grouped(serve_plan))


def serve_plan(
    options: ServeOptions,
    template: Annotated[
        str | None,
        typer.Option("--template", metavar="shell|systemd|compose|k8s", help="Print a file of this kind instead."),
    ] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="What INT4 could gain at most, by bytes alone.")] = False,
    allow_overcommit: mem.OvercommitOption = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Print launch lines of a prefill pool, a decode pool and their router, or of one pool, and what fits on each.

    Every flag has its reason beside it, and every pool a memory plan that agrees with its flags. Exits with 4 where the
    engine cannot load a checkpoint, with 5 where a pool does not fit.

    Example: quantkit serve-plan glm-5.2 --prefill glm-5.2 --gpu h200 --tp 8 --context 128k
    """
    from quantkit.cli.serve_request import request_of
    from quantkit.cli.show_serving import ServeOutput, show_serving

    shown = ServeOutput(template=template, with_estimate=estimate, as_json=as_json, allow_overcommit=allow_overcommit)
    show_serving(request_of(options), shown)
