"""Options of `serve-plan`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from quantkit.cli import memory_options as mem
from quantkit.engines.launch import BACKENDS

_OF_MEMORY = (
    *("tp", "ep", "dp_attention", "gpu", "gpu_gib", "engine", "kv_dtype", "context", "concurrency"),
    *("mem_fraction_static", "gpu_memory_utilization"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What is served, by which pools, and under which names."""

    output: Annotated[
        str,
        typer.Argument(
            metavar="OUTPUT",
            help="A conversion's directory, or a recipe (glm-5.2) for what it would make; a hub id or config.json, "
            "too.",
        ),
    ]
    prefill: Annotated[
        str | None,
        typer.Option(
            "--prefill",
            metavar="SOURCE",
            help="A prefill pool serves this, the FP8 source say; OUTPUT decodes (SGLang).",
        ),
    ] = None
    engine: mem.EngineOption = None
    gpu: mem.GpuOption = None
    gpu_gib: mem.GpuGibOption = None
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", help="GPUs that share every layer of OUTPUT [default: 8].")
    ] = None
    prefill_tp: Annotated[
        int | None,
        typer.Option(
            "--prefill-tp", metavar="N", help="Of the prefill pool; above 8 on several nodes [default: --tp]."
        ),
    ] = None
    ep: mem.EpOption = None
    dp_attention: mem.DpAttentionOption = None
    backend: Annotated[
        str,
        typer.Option("--backend", metavar="|".join(BACKENDS), help="What carries tokens between experts (SGLang)."),
    ] = BACKENDS[0]
    kv_dtype: Annotated[
        str | None,
        typer.Option("--kv-dtype", metavar="bf16|fp8", help="[default: fp8 with latent attention, else the engine's]."),
    ] = None
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            metavar="TOKENS",
            parser=mem.count_of_tokens,
            help="Of the longest request; 128k is 131072 [default: the model's].",
        ),
    ] = None
    concurrency: mem.ConcurrencyOption = None
    max_running_requests: Annotated[
        int | None,
        typer.Option(
            "--max-running-requests", metavar="N", help="At once [default: --concurrency, else the engine's]."
        ),
    ] = None
    mem_fraction_static: mem.MemFractionOption = None
    gpu_memory_utilization: mem.UtilizationOption = None
    mtp: Annotated[
        bool | None,
        typer.Option("--mtp/--no-mtp", help="Speculate with the MTP layer [default: where all pools have one]."),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option("--draft", metavar="SOURCE", help="Draft with the MTP layer of this checkpoint instead (SGLang)."),
    ] = None
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="NAME,...", help="Of OUTPUT's nodes, as others reach them [default: its pool]."),
    ] = None
    prefill_host: Annotated[
        str | None,
        typer.Option("--prefill-host", metavar="NAME,...", help="Of the prefill nodes [default: prefill]."),
    ] = None
    port: Annotated[
        int | None,
        typer.Option("--port", metavar="N", help="Of the servers, the decode pool's one more [default: the engine's]."),
    ] = None
    router_port: Annotated[
        int | None,
        typer.Option("--router-port", metavar="N", help="Of the router in front of a pair [default: 8000]."),
    ] = None
    ib_device: Annotated[
        str | None,
        typer.Option("--ib-device", metavar="NAME,...", help="InfiniBand devices that carry KV, of both pools."),
    ] = None

    @property
    def memory(self) -> mem.MemoryOptions:
        """What `memory-plan` has, too, of OUTPUT's pool."""
        return mem.MemoryOptions(**{name: getattr(self, name) for name in _OF_MEMORY}).in_lower_case()
