"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from quantkit.errors import UsageError

SourceArgument = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="A recipe (glm-5.2), a hub id (org/name[@revision]) or a directory."),
]
OptionalSource = Annotated[
    Optional[str],  # noqa: UP045  (typer reads it)
    typer.Argument(metavar="[SOURCE]", help="A recipe (glm-5.2), a hub id (org/name[@revision]) or a directory."),
]
ToOption = Annotated[Optional[str], typer.Option("--to", metavar="TARGET", help="Target format: int4.")]  # noqa: UP045
RecipeOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--recipe", metavar="NAME|FILE", help="Recipe to use instead of the one that SOURCE implies."),
]
GroupSizeOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--group-size", metavar="32|64|128", help="Columns that share a scale [recipe: 32]."),
]
ScalesOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--scales", metavar="search|absmax", help="How scales are chosen [recipe: search]."),
]
SignedOption = Annotated[
    Optional[bool],  # noqa: UP045
    typer.Option("--signed-scales/--positive-scales", help="Whether scales may be negative [recipe: signed]."),
]
TargetsOption = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--targets",
        metavar="NAME|re:REGEX",
        help="Quantize these modules instead of the recipe's. Repeatable.",
    ),
]
IgnoreOption = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--ignore", metavar="NAME|re:REGEX", help="Keep these modules unquantized. Repeatable."),
]
AllowUnmatchedOption = Annotated[bool, typer.Option("--allow-unmatched", help="Accept a rule that matches no weight.")]
AllowIncompleteOption = Annotated[
    bool,
    typer.Option("--allow-incomplete", help="Accept a source that lacks weights which its config promises."),
]
JobsOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--jobs", "-j", min=1, metavar="N", help="Worker threads [default: the cores available]."),
]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume/--no-resume", help="Go on from what an earlier run has finished, or throw it away."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else to stdout.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
OutputOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--output", "-o", metavar="DIR", help="Directory to create [default: ./NAME-int4]."),
]

TARGETS = ("int4",)


def check_to(target: str | None) -> None:
    """Raise UsageError for an unknown target."""
    if target is not None and target not in TARGETS:
        raise UsageError(f"unknown target {target!r}", remedy=f"known: {', '.join(TARGETS)}")
