"""Overhead that servers logged: activations, workspaces and graphs, which are neither weights nor KV pool."""

from dataclasses import dataclass
from statistics import median

from quantkit.memory.budget import Band
from quantkit.memory.gpus import GPUS, Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A server whose log tells its pool: what neither weights nor pool explain, GiB a rank. All have latent attention.

    ``gpu``: its name in the table of GPUs.
    """

    server: str
    gpu: str
    overhead_gib: float
    is_eager: bool


# utilization x total - pool - planned weights and copies
OBSERVATIONS: tuple[Observation, ...] = (
    Observation(server="GLM-5.1-FP8, 8 x H200, 0.19", gpu="h200", overhead_gib=4.8, is_eager=True),
    Observation(server="GLM-5.1-FP8, 8 x H200, later", gpu="h200", overhead_gib=2.0, is_eager=True),
    Observation(server="Kimi-K2-Thinking, 8 x H200, 2025-11", gpu="h200", overhead_gib=8.1, is_eager=False),
    Observation(server="Kimi-K2.6, 8 x H200, published context", gpu="h200", overhead_gib=9.8, is_eager=False),
    Observation(server="Kimi-K2.5, 8 x H100, 64 sequences of 8,192", gpu="h100", overhead_gib=3.3, is_eager=False),
)


def overhead_band(gpu: Gpu, *, is_eager: bool, is_latent: bool) -> Band:
    """Least and most of what was logged, around the median of what is nearest.

    Nearest is what ran on GPUs of no more memory, for a model with latent attention; else it is all of it.
    """
    logged = observations_of(is_eager=is_eager)
    near = [one for one in logged if is_latent and GPUS[one.gpu].total_gib <= gpu.total_gib]
    all_gib = [one.overhead_gib for one in logged]
    return Band(low=min(all_gib), mid=median(one.overhead_gib for one in near or logged), high=max(all_gib))


def observations_of(*, is_eager: bool) -> list[Observation]:
    """Of servers with CUDA graphs, or without."""
    return [one for one in OBSERVATIONS if one.is_eager == is_eager]
