"""`quantkit kv-scales`: scales of an FP8 KV cache, what they would change, and who would read them."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from quantkit.cli import options as opt
from quantkit.engines.parallel import MOST_GPUS


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("kv-scales")(kv_scales)


def kv_scales(
    source: opt.SourceArgument,
    stats: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--stats", metavar="FILE", help="Statistics of this model's keys and values."),
    ] = None,
    method: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--method", metavar="absmax|percentile|mse|unit", help="How scales are chosen [default: absmax]."),
    ] = None,
    percentile: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--percentile",
            metavar="SHARE",
            help="Per cent that are not clipped, of --method percentile [default: 99.99].",
        ),
    ] = None,
    per: Annotated[str, typer.Option("--per", metavar="tensor|head", help="What shares a scale.")] = "tensor",
    spelling: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--format",
            metavar="compressed-tensors|modelopt|sglang",
            help="Whose names are written [default: SOURCE's].",
        ),
    ] = None,
    tp: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--tp", min=1, max=MOST_GPUS, metavar="N", help="Ranks that --format sglang holds a map for."),
    ] = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output", "-o", metavar="PATH", help="What is written [default: ./NAME-kv-scales...]."),
    ] = None,
    write_to: Annotated[
        str,
        typer.Option(
            "--write-to", metavar="sidecar|checkpoint", help="A file of its own, or a copy of SOURCE made of links."
        ),
    ] = "sidecar",
    force: Annotated[
        bool, typer.Option("--force", help="Write even what no default backend uses, or one misreads.")
    ] = False,
    quiet: opt.QuietOption = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Choose scales for an FP8 KV cache, and say of every engine and backend whether it uses them.

    Without --stats: for latent attention (MLA) a bound of the latent from the gains of its norm, which may prove that
    scale 1.0 cannot clip it; and the table. With --stats also what FP8 loses at scale 1.0 and at the chosen scales, in
    every layer. Nothing is written where scales do nothing, or harm in some backend, unless --force is given.

    Example: quantkit kv-scales ./glm-4.7-int4 --stats stats.safetensors
    """
    from quantkit.cli import render
    from quantkit.cli.kv_scales_request import requests_of
    from quantkit.cli.show_kv_scales import show_kv_scales
    from quantkit.kv_scales.run import WriteRequest, run_kv_scales

    request, into_checkpoint = requests_of(
        statistics=stats, method=method, percentile=percentile, per=per, spelling=spelling, write_to=write_to
    )
    write = WriteRequest(output=output, into_checkpoint=into_checkpoint, force=force, tp=tp)
    with render.progress(is_quiet=quiet) as advance:
        result = run_kv_scales(source, request, write, report_progress=advance)
    show_kv_scales(result, as_json=as_json)
