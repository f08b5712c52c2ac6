"""`quantkit card`: the model card of an output, as it lies in it."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options as opt


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("card")(card)


def card(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The directory that a conversion made.")],
    as_json: opt.JsonOption = False,
) -> None:
    """Print the model card of an output, made from its conversion.json and config.json: the same as its README.md.

    Exits with 4 when conversion.json is missing or damaged, with 3 when there is no such directory.

    Example: quantkit card ./glm-5.2-int4
    """
    from quantkit.cli.show_results import show_card
    from quantkit.convert.card import read_card

    show_card(output, read_card(output), as_json=as_json)
