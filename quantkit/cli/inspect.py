"""`quantkit inspect`: what a checkpoint is, from its headers."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options as opt


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("inspect")(inspect)


def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint directory.")],
    as_json: opt.JsonOption = False,
) -> None:
    """Say what a checkpoint is: family, scheme, dtypes, parameters and bytes by part. Reads headers only.

    Example: quantkit inspect ./glm-5.2-int4
    """
    from quantkit.checkpoint.source import open_checkpoint
    from quantkit.cli import documents, render
    from quantkit.machine import bytes_text
    from quantkit.weights.inspection import inspect_checkpoint

    report = inspect_checkpoint(open_checkpoint(path))
    if as_json:
        render.show_json(documents.inspect_document(report))
        return
    rows = [
        [
            part.role.value,
            part.dtype,
            render.count(part.num_tensors),
            render.count(part.num_elements),
            bytes_text(part.num_bytes),
        ]
        for part in report.parts
    ]
    render.show_table(
        f"{path}: {report.family} ({report.model_type}), {report.scheme}",
        ["part", "dtype", "tensors", "elements", "size"],
        rows,
    )
    render.show_line(
        f"{render.count(report.num_tensors)} tensors in {report.num_shards} shards, {bytes_text(report.num_bytes)}, "
        f"{render.count(report.num_parameters)} parameters"
    )
