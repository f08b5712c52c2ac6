"""The options of `plan` and `convert` that say what becomes of the weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options as opt

_OF_THE_RECIPE = (
    *("group_size", "method", "scales", "signed_scales", "zero_points"),
    *("layout", "activations", "rest", "mtp"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """A recipe, what is changed of it, and what is taken though it is not as it should be."""

    recipe: Annotated[
        str | None,
        typer.Option("--recipe", metavar="NAME|FILE", help="Recipe to use instead of the one that SOURCE implies."),
    ] = None
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", metavar="32|64|128", help="Columns that share a scale [recipe: 32]."),
    ] = None
    method: Annotated[
        str | None,
        typer.Option("--method", metavar="search|gptq|awq", help="What chooses codes and scales [recipe: search]."),
    ] = None
    scales: Annotated[
        str | None,
        typer.Option("--scales", metavar="search|absmax", help="How scales are chosen [recipe: search]."),
    ] = None
    signed_scales: Annotated[
        bool | None,
        typer.Option("--signed-scales/--positive-scales", help="Whether scales may be negative [recipe: signed]."),
    ] = None
    zero_points: Annotated[
        bool | None,
        typer.Option("--zero-points/--symmetric", help="Asymmetric INT4, which vLLM alone loads [recipe: symmetric]."),
    ] = None
    layout: Annotated[
        str | None,
        typer.Option("--format", metavar="compressed-tensors|w4afp8", help="How INT4 is laid out [recipe]."),
    ] = None
    activations: opt.ActivationsOption = None
    stats: opt.StatsOption = None
    importance: Annotated[
        Path | None,
        typer.Option(
            "--importance",
            metavar="FILE",
            help="Weight the search by second moments: calibrate's file, imatrix.gguf or .dat. Activations: --stats.",
        ),
    ] = None
    rest: opt.RestOption = None
    mtp: opt.MtpOption = None
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--targets",
            metavar="NAME|re:REGEX",
            help="Quantize these modules instead of the recipe's. Repeatable.",
        ),
    ] = None
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="NAME|re:REGEX", help="Keep these modules unquantized. Repeatable."),
    ] = None
    allow_unmatched: Annotated[
        bool, typer.Option("--allow-unmatched", help="Accept a rule that matches no weight.")
    ] = False
    allow_incomplete: opt.AllowIncompleteOption = False
    engine: opt.ServingEngineOption = None
    allow_unservable: opt.AllowUnservableOption = False

    @property
    def settings(self) -> dict[str, object]:
        """Fields of the recipe; None where that stands as it is."""
        return {name: getattr(self, name) for name in _OF_THE_RECIPE}
