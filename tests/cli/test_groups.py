"""A dataclass as a parameter of a command stands for an option in each of its fields."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from quantkit.cli.groups import grouped


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    width: Annotated[int, typer.Option("--width", min=1, help="Of it.")]
    names: Annotated[list[str] | None, typer.Option("--name")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    colour: Annotated[str, typer.Option("--colour")] = "red"


def called(*arguments):
    """What a command is called with, and the result of calling it."""
    seen = []

    def draw(
        what: Annotated[str, typer.Argument(metavar="WHAT")],
        dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
        *,
        size: Size,
        quiet: Annotated[bool, typer.Option("--quiet")] = False,
        look: Look,
    ) -> None:
        """Draw it."""
        seen.append((what, dry_run, size, quiet, look))

    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command("draw")(grouped(draw))
    return seen, CliRunner().invoke(app, list(arguments))


def test_a_command_gets_its_groups_whole():
    options = ["--width", "3", "--name", "a", "--name", "b", "--dry-run", "--colour", "blue"]
    seen, result = called("x", *options)
    assert result.exit_code == 0, result.output
    assert seen == [("x", True, Size(width=3, names=["a", "b"]), False, Look(colour="blue"))]
    seen, _ = called("x", "--width", "1")
    assert seen == [("x", False, Size(width=1, names=None), False, Look(colour="red"))]


def test_options_stand_in_help_where_their_group_does():
    _, result = called("--help")
    assert "Draw it." in result.output
    options = ["--dry-run", "--width", "--name", "--quiet", "--colour"]
    places = [result.output.index(option) for option in options]
    assert places == sorted(places)
    assert "Of it." in result.output
    assert "[default: red]" in result.output


@pytest.mark.parametrize(("arguments", "told"), [(["x"], "--width"), (["x", "--width", "0"], "x>=1")])
def test_what_an_option_needs_is_asked_for(arguments, told):
    seen, result = called(*arguments)
    assert (seen, result.exit_code) == ([], 2)
    assert told in result.output


def test_two_options_of_one_name_are_a_bug():
    def draw(*, width: Annotated[int, typer.Option("--other")] = 0, size: Size) -> None:
        pass

    with pytest.raises(ValueError, match="duplicate parameter name: 'width'"):
        grouped(draw)
