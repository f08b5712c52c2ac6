"""From weights to KV pool: how each engine divides what a GPU has.

Overhead is no formula: it is a band with its source. SGLang reserves a share for it and the question is whether it
fits in there; vLLM measures it and gives the pool what is left.
"""

from dataclasses import dataclass
from typing import Literal

from quantkit.engines.parallel import EngineName, Parallel
from quantkit.errors import UsageError
from quantkit.memory.gpus import Gpu

PoolRole = Literal["both", "prefill", "decode"]
POOL_ROLES: tuple[PoolRole, ...] = ("both", "prefill", "decode")
MIB_PER_GIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """GiB at best, expected, at worst."""

    low: float
    mid: float
    high: float

    def __add__(self, other: "Band") -> "Band":
        return Band(low=self.low + other.low, mid=self.mid + other.mid, high=self.high + other.high)


# logged weights less the planned ones (absorbed copies counted): quantization buffers, workspaces
BUFFERS = Band(low=0.05, mid=0.35, high=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """How the engine is started. ``fraction`` is None for the engine's default; ``context`` in tokens a request.

    ``role``: of a pool in disaggregated serving, or ``both``. ``is_eager``: without CUDA graphs. ``uses_aiter``: AMD's
    attention kernels. ``vision_complexity``: a vision tower's layers x hidden^2, in those of ViT-L.
    ``concurrency``: what an attention replica is asked for; ``max_running_requests``: of the server, where it is given.
    """

    engine: EngineName
    gpu: Gpu
    parallel: Parallel
    context: int
    is_latent: bool
    fraction: float | None = None
    role: PoolRole = "both"
    is_eager: bool = False
    with_mtp: bool = False
    uses_aiter: bool = False
    vision_complexity: float | None = None
    concurrency: int = 1
    max_running_requests: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one rank has. ``pool`` may be negative: then the weights alone are too much.

    ``loaded``: weights, copies and buffers. ``overhead``: activations, graphs, tables. ``limit_gib``: what weights
    and pool may take together. ``spare_gib``: what the engine leaves for overhead beside the pool, where it reserves.
    """

    fraction: float
    is_default: bool
    rule: str
    pool: Band
    overhead: Band
    overhead_source: str
    limit_gib: float
    spare_gib: float | None


def check_fraction(engine: EngineName, fraction: float | None) -> None:
    """Raise UsageError for what is no fraction."""
    if fraction is not None and not 0 < fraction < 1:
        raise UsageError(f"{FRACTION_OPTIONS[engine]} {fraction:g} is no share of a GPU", remedy="give 0.88, say")


FRACTION_OPTIONS: dict[EngineName, str] = {
    "sglang": "--mem-fraction-static",
    "vllm": "--gpu-memory-utilization",
}
