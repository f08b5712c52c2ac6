"""Options of `serve-plan` that no other command has."""

from typing import Annotated, Optional

import typer

from quantkit.cli.memory_options import count_of_tokens
from quantkit.engines.launch import BACKENDS

OutputArgument = Annotated[
    str,
    typer.Argument(
        metavar="OUTPUT",
        help="A conversion's directory, or a recipe (glm-5.2) for what it would make; a hub id or config.json, too.",
    ),
]
PrefillOption = Annotated[
    Optional[str],  # noqa: UP045  (typer reads it)
    typer.Option(
        "--prefill", metavar="SOURCE", help="A prefill pool serves this, the FP8 source say; OUTPUT decodes (SGLang)."
    ),
]
TpOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--tp", metavar="N", help="GPUs that share every layer of OUTPUT [default: 8]."),
]
PrefillTpOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--prefill-tp", metavar="N", help="Of the prefill pool; above 8 on several nodes [default: --tp]."),
]
BackendOption = Annotated[
    str, typer.Option("--backend", metavar="|".join(BACKENDS), help="What carries tokens between experts (SGLang).")
]
ContextOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--context",
        metavar="TOKENS",
        parser=count_of_tokens,
        help="Of the longest request; 128k is 131072 [default: the model's].",
    ),
]
KvDtypeOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--kv-dtype", metavar="bf16|fp8", help="[default: fp8 with latent attention, else the engine's]."),
]
MtpOption = Annotated[
    Optional[bool],  # noqa: UP045
    typer.Option("--mtp/--no-mtp", help="Speculate with the MTP layer [default: where all pools have one]."),
]
DraftOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--draft", metavar="SOURCE", help="Draft with the MTP layer of this checkpoint instead (SGLang)."),
]
MaxRequestsOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--max-running-requests", metavar="N", help="At once [default: --concurrency, else the engine's]."),
]
HostOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--host", metavar="NAME,...", help="Of OUTPUT's nodes, as others reach them [default: its pool]."),
]
PrefillHostOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--prefill-host", metavar="NAME,...", help="Of the prefill nodes [default: prefill]."),
]
PortOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--port", metavar="N", help="Of the servers, the decode pool's one more [default: the engine's]."),
]
RouterPortOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--router-port", metavar="N", help="Of the router in front of a pair [default: 8000]."),
]
IbDeviceOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--ib-device", metavar="NAME,...", help="InfiniBand devices that carry KV, of both pools."),
]
TemplateOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--template", metavar="shell|systemd|compose|k8s", help="Print a file of this kind instead."),
]
EstimateOption = Annotated[bool, typer.Option("--estimate", help="What INT4 could gain at most, by bytes alone.")]
