"""Options of `memory-plan`, named as the engines name them where they do."""

from typing import Annotated, Optional

import typer

from quantkit.engines.parallel import DEFAULT_ENGINE, ENGINES


def count_of_tokens(text: str) -> int:
    """A whole number; a k behind it, of either case, means times 1024."""
    digits = text.removesuffix("k").removesuffix("K")
    if not digits.isascii() or not digits.removeprefix("-").isdigit() or len(text) - len(digits) > 1:
        raise typer.BadParameter(f"{text!r} is no number of tokens: give 131072 or 128k, say")
    return int(digits) * (1 if digits == text else 1024)


ModelArgument = Annotated[
    Optional[str],  # noqa: UP045  (typer reads it)
    typer.Argument(
        metavar="[MODEL]", help="A recipe (glm-5.2), a hub id (org/name[@revision]), a config.json or a directory."
    ),
]
SchemeOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--scheme", "--to", metavar="fp8|bf16|int4", help="Weights as [default: as the model is stored]."),
]
GroupSizeOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--group-size", metavar="32|64|128", help="Of INT4 experts [default: 32]."),
]
RestOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--rest", metavar="bf16|fp8|fp8-native", help="What FP8 weights beside INT4 become [default: bf16]."),
]
CompareOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--compare", metavar="A,B", help="Two schemes side by side (fp8,int4), and the difference."),
]
TpOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--tp", metavar="N", help="GPUs that share every layer [default: 8]."),
]
EpOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--ep", metavar="N", help="Groups among them that experts are dealt out to [default: 1]."),
]
PpOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--pp", metavar="N", help="Pipeline stages, each of --tp GPUs [default: 1]."),
]
DpAttentionOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--dp-attention", metavar="N", help="Replicas of attention among the --tp GPUs [default: 1]."),
]
DcpOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--dcp", metavar="N", help="Slices of each request's KV cache (decode context parallel)."),
]
GpuOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--gpu", metavar="NAME", help="h100, h200, b200, mi355x, ... [default: h200]."),
]
GpuGibOption = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--gpu-gib", metavar="GIB", help="Its memory as torch reports it, instead of the table's."),
]
EngineOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--engine", metavar="|".join(ENGINES), help=f"Serving engine [default: {DEFAULT_ENGINE}]."),
]
RoleOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--role", metavar="both|prefill|decode", help="Pool in disaggregated serving (SGLang)."),
]
MemFractionOption = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--mem-fraction-static", metavar="F", help="SGLang's fraction [default: as SGLang computes it]."),
]
UtilizationOption = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--gpu-memory-utilization", metavar="F", help="vLLM's fraction [default: 0.92]."),
]
KvDtypeOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--kv-dtype", metavar="bf16|fp8", help="Of the KV cache [default: the engine's on this GPU]."),
]
KvLayoutOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--kv-layout",
        metavar="packed|raw",
        help="FP8 rows of 656 or of 576 bytes [default: the engine's on this GPU].",
    ),
]
MtpOption = Annotated[bool, typer.Option("--with-mtp", "--mtp", help="Count the MTP layer (speculative decoding).")]
EagerOption = Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")]
ContextOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--context",
        metavar="TOKENS",
        parser=count_of_tokens,
        help="Of a request that must fit; 128k is 131072 [default: the model's, and none must fit].",
    ),
]
ContextAtMostOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--context-at-most",
        metavar="TOKENS",
        parser=count_of_tokens,
        help="In place of --context: of a request of the model's full context that must fit, but no longer than this.",
    ),
]
ConcurrencyOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--concurrency",
        metavar="N",
        help="Requests at once that must fit, of --context or else the model's full context.",
    ),
]
MaxRequestsOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--max-running-requests", metavar="N", help="As SGLang is started; its table of tokens grows."),
]
OvercommitOption = Annotated[bool, typer.Option("--allow-overcommit", help="Exit 0 and warn where it does not fit.")]
