"""Overhead that servers logged: activations, workspaces and graphs, which are neither weights nor KV pool."""

from dataclasses import dataclass

from quantkit.memory.budget import Band


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A server whose log tells its pool: what neither weights nor pool explain, GiB a rank."""

    server: str
    overhead_gib: float
    is_eager: bool


# utilization x total - pool - planned weights and copies
OBSERVATIONS: tuple[Observation, ...] = (
    Observation(server="GLM-5.1-FP8, 8 x H200, 0.19", overhead_gib=4.8, is_eager=True),
    Observation(server="GLM-5.1-FP8, 8 x H200, later", overhead_gib=2.0, is_eager=True),
    Observation(server="Kimi-K2-Thinking, 8 x H200, 2025-11", overhead_gib=8.1, is_eager=False),
    Observation(server="Kimi-K2.6, 8 x H200, published context", overhead_gib=9.8, is_eager=False),
    Observation(server="Kimi-K2.5, 8 x H100, 64 sequences of 8,192", overhead_gib=3.3, is_eager=False),
)


def overhead_band(*, is_eager: bool) -> Band:
    """Least, median and most of what was logged."""
    logged = sorted(one.overhead_gib for one in OBSERVATIONS if one.is_eager == is_eager)
    half = len(logged) // 2
    middle = logged[half] if len(logged) % 2 else (logged[half - 1] + logged[half]) / 2
    return Band(low=logged[0], mid=middle, high=logged[-1])
