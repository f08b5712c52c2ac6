"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from quantkit.cli.summary_file import check_summary
from quantkit.engines.parallel import ENGINES, EngineName
from quantkit.registry import one_of

SourceArgument = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="A recipe (glm-5.2), a hub id (org/name[@revision]) or a directory."),
]
OptionalSource = Annotated[
    Optional[str],  # noqa: UP045  (typer reads it)
    typer.Argument(metavar="[SOURCE]", help="A recipe (glm-5.2), a hub id (org/name[@revision]) or a directory."),
]
ToOption = Annotated[Optional[str], typer.Option("--to", metavar="TARGET", help="Target format: int4.")]  # noqa: UP045
RestOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--rest",
        metavar="bf16|fp8|fp8-native",
        help="What kept FP8 weights become: fp8 where the engines load that, fp8-native as SGLang alone does.",
    ),
]
ActivationsOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--activations", metavar="none|fp8-dynamic", help="How engines quantize the input of INT4 [recipe: none]."
    ),
]
StatsOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--stats",
        metavar="FILE",
        help="Largest inputs of experts (calibrate's file, say), for w4afp8's activation scales; the search sees none.",
    ),
]
MtpOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--mtp", metavar="int4|bf16|fp8|drop", help="What the experts of the draft become [recipe: int4]."),
]
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
SpoolOption = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--spool-gib", metavar="GIB", help="Disk for shards on their way from the hub [default: 40]."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else to stdout.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
SummaryOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--summary", metavar="FILE.md", callback=check_summary, help="Append the result in Markdown, too."),
]
ServingEngineOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--engine", metavar="|".join(ENGINES), help="The engine that will serve it [default: the recipe's]."),
]
AllowUnservableOption = Annotated[
    bool, typer.Option("--allow-unservable", help="Convert even what the engine that is meant cannot load.")
]
RoomOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--output", "-o", metavar="DIR", help="Refuse where this output's disk or this memory has no room."),
]

TARGETS = ("int4",)


def check_to(target: str | None) -> None:
    """Raise UsageError for an unknown target."""
    if target is not None:
        one_of("--to", target, TARGETS)


def check_engine_name(engine: str | None) -> EngineName | None:
    """Raises UsageError for an engine that is not known."""
    return None if engine is None else one_of("--engine", engine, ENGINES)


def spool_bytes(spool_gib: float | None) -> int:
    """Bytes of --spool-gib."""
    from quantkit.convert.conversion import SPOOL_GIB

    return int((SPOOL_GIB if spool_gib is None else spool_gib) * 2**30)
