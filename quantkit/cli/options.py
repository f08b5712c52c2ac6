"""Options that several commands share."""

import re
from pathlib import Path
from typing import Annotated, Optional

import typer

from quantkit.cli.summary_file import check_summary
from quantkit.engines.parallel import ENGINES, EngineName
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
RestOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--rest",
        metavar="bf16|fp8|fp8-native",
        help="What kept FP8 weights become: fp8 where the engines load that, fp8-native as SGLang alone does.",
    ),
]
FormatOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--format", metavar="compressed-tensors|w4afp8", help="How INT4 is laid out [recipe]."),
]
ActivationsOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--activations", metavar="none|fp8-dynamic", help="How engines quantize the input of INT4 [recipe: none]."
    ),
]
StatsOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--stats", metavar="FILE", help="Largest inputs of experts (safetensors), for static scales: w4afp8."),
]
ImportanceOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--importance",
        metavar="FILE",
        help="Weight the search by second moments: statistics, imatrix.gguf or imatrix.dat.",
    ),
]
ZeroPointsOption = Annotated[
    Optional[bool],  # noqa: UP045
    typer.Option("--zero-points/--symmetric", help="Asymmetric INT4, which vLLM alone loads [recipe: symmetric]."),
]
MtpOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--mtp", metavar="int4|bf16|fp8|drop", help="What the experts of the draft become [recipe: int4]."),
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
DeviceOption = Annotated[
    str,
    typer.Option("--device", metavar="DEVICE", help="cpu, or GPUs: cuda, cuda:0,cuda:1 or cuda:all. Same bytes."),
]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume/--no-resume", help="Go on from what an earlier run has finished, or throw it away."),
]
AcceptCompleteOption = Annotated[
    bool,
    typer.Option("--accept-complete", help="Where OUTPUT is complete and of this very command, leave it and succeed."),
]
RankOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--rank", metavar="R", help="Make the share of rank R, from 0, of --world-size processes."),
]
WorldSizeOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--world-size", metavar="W", help="Processes, on one or many machines, that share OUTPUT's disk."),
]
FinalizeOption = Annotated[bool, typer.Option("--finalize", help="Publish what all ranks have made.")]
MaxMemoryOption = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--max-memory", metavar="GIB", help="Of this process [default: what machine or container has left]."),
]
ExecutorOption = Annotated[
    str, typer.Option("--executor", metavar="local|ray", help="Threads here, or a Ray cluster that is there already.")
]
RayAddressOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--ray-address", metavar="ADDRESS", help="Of the cluster [default: auto]."),
]
SpoolOption = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--spool-gib", metavar="GIB", help="Disk for shards on their way from the hub [default: 40]."),
]
KeepSourceOption = Annotated[
    bool, typer.Option("--keep-source", help="Download a hub repository into the hub client's cache, and keep it.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else to stdout.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
PushToOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--push-to", metavar="ORG/NAME", help="Upload the finished output to this repository of the hub."),
]
PublicOption = Annotated[bool, typer.Option("--public", help="Let everybody read it [default: private].")]
OutputOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--output", "-o", metavar="DIR", help="Directory to create [default: ./NAME-int4]."),
]
LimitShardsOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--limit-shards", min=1, metavar="N", help="Smoke run: the first N output shards only."),
]
LayersOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--layers", metavar="A-B", help="Smoke run: only layers A to B, and what lies in no layer."),
]
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
EXECUTORS = ("local", "ray")


def check_to(target: str | None) -> None:
    """Raise UsageError for an unknown target."""
    if target is not None and target not in TARGETS:
        raise UsageError(f"unknown target {target!r}", remedy=f"known: {', '.join(TARGETS)}")


def check_engine_name(engine: str | None) -> EngineName | None:
    """Raises UsageError for an engine that is not known."""
    known = next((name for name in ENGINES if name == engine), None)
    if engine is not None and known is None:
        raise UsageError(f"unknown engine {engine!r}", remedy=f"known: {', '.join(ENGINES)}")
    return known


def spool_bytes(spool_gib: float | None) -> int:
    """Bytes of --spool-gib."""
    from quantkit.convert.conversion import SPOOL_GIB

    return int((SPOOL_GIB if spool_gib is None else spool_gib) * 2**30)


def check_memory(max_memory: float | None) -> int | None:
    """Bytes of --max-memory. Raises UsageError for what is none."""
    if max_memory is None:
        return None
    if not 0 < max_memory < 1e6:
        raise UsageError(f"--max-memory {max_memory:g} is no memory", remedy="give GiB, 2 say")
    return int(max_memory * 2**30)


def check_executor(
    executor: str, *, ray_address: str | None, is_shared: bool, jobs: int | None, max_memory: float | None
) -> None:
    """Raise UsageError for a way of execution that is not known, or that does not go with the other options."""
    if executor not in EXECUTORS:
        raise UsageError(f"--executor {executor} is not known", remedy=f"choose {', '.join(EXECUTORS)}")
    if executor != "ray" and ray_address is not None:
        raise UsageError("--ray-address is an option of --executor ray", remedy="add --executor ray")
    if executor == "ray" and is_shared:
        raise UsageError("Ray shares the work itself", remedy="leave --rank, --world-size and --finalize out")
    if executor == "ray" and (jobs is not None or max_memory is not None):
        raise UsageError(
            "every node of a Ray cluster uses the cores that Ray has of it, as its memory allows",
            remedy="leave --jobs and --max-memory out; `ray start --num-cpus` bounds a node",
        )


def check_device(device: str, *, executor: str, finalize: bool, dry_run: bool) -> None:
    """Raise UsageError for a device that is none, or not here; a cluster's nodes look for it themselves."""
    from quantkit.transcode import CPU, choose_kernels, device_names

    device_names(device)
    if finalize and device != CPU:
        raise UsageError("--finalize computes nothing", remedy="leave --device out")
    if executor == "local" and not dry_run:
        choose_kernels(device)


def check_sharing(*, rank: int | None, world_size: int | None, finalize: bool, resume: bool) -> None:
    """Raise UsageError for options of several processes that do not go together."""
    if (rank is None) != (world_size is None):
        raise UsageError("--rank and --world-size go together", remedy="give both, or neither")
    from quantkit.convert.run import MOST_RANKS

    if world_size is not None and not 1 <= world_size <= MOST_RANKS:
        raise UsageError(f"--world-size {world_size} is no number of ranks", remedy=f"give 1 to {MOST_RANKS}")
    if finalize and rank is not None:
        raise UsageError("--finalize comes after all ranks", remedy="leave --rank and --world-size out")
    if not resume and (finalize or rank is not None):
        raise UsageError(
            "--no-resume would throw away what other ranks have made", remedy="remove the partial directory instead"
        )


def check_limits(
    *, limit_shards: int | None, layers: str | None, rank: int | None, finalize: bool
) -> tuple[int | None, tuple[int, int] | None]:
    """The limits of a smoke run. Raises UsageError for layers that are no A-B, and for limits on a shared run."""
    if (limit_shards is not None or layers is not None) and (rank is not None or finalize):
        raise UsageError("a smoke run is made by one process", remedy="leave --rank, --world-size and --finalize out")
    if layers is None:
        return limit_shards, None
    match = re.fullmatch(r"([0-9]{1,6})-([0-9]{1,6})", layers)
    if match is None:
        raise UsageError(f"--layers {layers} is no A-B", remedy="give the first and the last layer, as in 0-3")
    return limit_shards, (int(match[1]), int(match[2]))


def check_pushing(*, push_to: str | None, public: bool, rank: int | None, is_limited: bool) -> None:
    """Raise UsageError for what is no repository, and for options that do not go with one."""
    if public and push_to is None:
        raise UsageError("--public says who may read what --push-to uploads", remedy="give --push-to org/name too")
    if push_to is None:
        return
    if re.fullmatch(r"[\w.-]+/[\w.-]+", push_to) is None:
        raise UsageError(f"--push-to {push_to!r} is no name on the hub", remedy="write it as org/name")
    if is_limited:
        raise UsageError("a smoke run is never published", remedy="leave --push-to out, or the limits")
    if rank is not None:
        raise UsageError("a rank makes no whole output to push", remedy="give --push-to together with --finalize")
