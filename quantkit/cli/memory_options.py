"""Options of `memory-plan`, named as the engines name them where they do; those that `serve-plan` has, too."""

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from quantkit.engines.parallel import DEFAULT_ENGINE, ENGINES


def count_of_tokens(text: str) -> int:
    """A whole number; a k behind it, of either case, means times 1024."""
    digits = text.removesuffix("k").removesuffix("K")
    if not digits.isascii() or not digits.removeprefix("-").isdigit() or len(text) - len(digits) > 1:
        raise typer.BadParameter(f"{text!r} is no number of tokens: give 131072 or 128k, say")
    return int(digits) * (1 if digits == text else 1024)


EngineOption = Annotated[
    str | None,
    typer.Option("--engine", metavar="|".join(ENGINES), help=f"Serving engine [default: {DEFAULT_ENGINE}]."),
]
GpuOption = Annotated[
    str | None, typer.Option("--gpu", metavar="NAME", help="h100, h200, b200, mi355x, ... [default: h200].")
]
GpuGibOption = Annotated[
    float | None,
    typer.Option("--gpu-gib", metavar="GIB", help="Its memory as torch reports it, instead of the table's."),
]
EpOption = Annotated[
    int | None, typer.Option("--ep", metavar="N", help="Groups among them that experts are dealt out to [default: 1].")
]
DpAttentionOption = Annotated[
    int | None,
    typer.Option("--dp-attention", metavar="N", help="Replicas of attention among the --tp GPUs [default: 1]."),
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        metavar="N",
        help="Requests at once that must fit, of --context or else the model's full context.",
    ),
]
MemFractionOption = Annotated[
    float | None,
    typer.Option("--mem-fraction-static", metavar="F", help="SGLang's fraction [default: as SGLang computes it]."),
]
UtilizationOption = Annotated[
    float | None, typer.Option("--gpu-memory-utilization", metavar="F", help="vLLM's fraction [default: 0.92].")
]
OvercommitOption = Annotated[bool, typer.Option("--allow-overcommit", help="Exit 0 and warn where it does not fit.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """What is planned, and for which servers; None where that was left out."""

    scheme: Annotated[
        str | None,
        typer.Option("--scheme", "--to", metavar="fp8|bf16|int4", help="Weights as [default: as the model is stored]."),
    ] = None
    group_size: Annotated[
        int | None, typer.Option("--group-size", metavar="32|64|128", help="Of INT4 experts [default: 32].")
    ] = None
    rest: Annotated[
        str | None,
        typer.Option(
            "--rest", metavar="bf16|fp8|fp8-native", help="What FP8 weights beside INT4 become [default: bf16]."
        ),
    ] = None
    compare: Annotated[
        str | None,
        typer.Option("--compare", metavar="A,B", help="Two schemes side by side (fp8,int4), and the difference."),
    ] = None
    tp: Annotated[int | None, typer.Option("--tp", metavar="N", help="GPUs that share every layer [default: 8].")] = (
        None
    )
    ep: EpOption = None
    pp: Annotated[
        int | None, typer.Option("--pp", metavar="N", help="Pipeline stages, each of --tp GPUs [default: 1].")
    ] = None
    dp_attention: DpAttentionOption = None
    dcp: Annotated[
        int | None,
        typer.Option("--dcp", metavar="N", help="Slices of each request's KV cache (decode context parallel)."),
    ] = None
    gpu: GpuOption = None
    gpu_gib: GpuGibOption = None
    engine: EngineOption = None
    role: Annotated[
        str | None,
        typer.Option("--role", metavar="both|prefill|decode", help="Pool in disaggregated serving (SGLang)."),
    ] = None
    mem_fraction_static: MemFractionOption = None
    gpu_memory_utilization: UtilizationOption = None
    kv_dtype: Annotated[
        str | None,
        typer.Option("--kv-dtype", metavar="bf16|fp8", help="Of the KV cache [default: the engine's on this GPU]."),
    ] = None
    kv_layout: Annotated[
        str | None,
        typer.Option(
            "--kv-layout",
            metavar="packed|raw",
            help="FP8 rows of 656 or of 576 bytes [default: the engine's on this GPU].",
        ),
    ] = None
    with_mtp: Annotated[
        bool, typer.Option("--with-mtp", "--mtp", help="Count the MTP layer (speculative decoding).")
    ] = False
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            metavar="TOKENS",
            parser=count_of_tokens,
            help="Of a request that must fit; 128k is 131072 [default: the model's, and none must fit].",
        ),
    ] = None
    context_at_most: Annotated[
        int | None,
        typer.Option(
            "--context-at-most",
            metavar="TOKENS",
            parser=count_of_tokens,
            help="In place of --context: of a request of the model's full context that must fit, but no longer than "
            "this.",
        ),
    ] = None
    concurrency: ConcurrencyOption = None
    max_running_requests: Annotated[
        int | None,
        typer.Option("--max-running-requests", metavar="N", help="As SGLang is started; its table of tokens grows."),
    ] = None

    def in_lower_case(self) -> "MemoryOptions":
        """With all words in lower case but those of --compare."""

        def lower(word: str | None) -> str | None:
            return None if word is None else word.lower()

        return replace(
            self,
            scheme=lower(self.scheme),
            rest=lower(self.rest),
            engine=lower(self.engine),
            role=lower(self.role),
            kv_dtype=lower(self.kv_dtype),
            kv_layout=lower(self.kv_layout),
        )
