"""vLLM 0.33: a fraction of the GPU's total is the budget, and the pool is what a profiling pass leaves of it.

    pool = total x utilization - (weights + everything the pass used) - estimate for CUDA graphs

What the pass uses depends on the batch it is run with, so the overhead is a band of what servers logged.
"""

from dataclasses import dataclass

from quantkit.memory.budget import Band, Budget, Server

DEFAULT_UTILIZATION = 0.92


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


def vllm_budget(server: Server, loaded: Band) -> Budget:
    """``loaded``: weights and copies; the overhead that was logged holds the buffers already."""
    utilization = DEFAULT_UTILIZATION if server.fraction is None else server.fraction
    requested_gib = server.gpu.total_gib * utilization
    overhead = overhead_band(is_eager=server.is_eager)
    used = loaded + overhead
    return Budget(
        fraction=utilization,
        is_default=server.fraction is None,
        rule="pool = total x utilization - weights - what the profiling pass and the CUDA graphs use",
        pool=Band(low=requested_gib - used.high, mid=requested_gib - used.mid, high=requested_gib - used.low),
        overhead=overhead,
        overhead_source="logged: "
        + "; ".join(
            f"{one.overhead_gib} GiB ({one.server})" for one in OBSERVATIONS if one.is_eager == server.is_eager
        ),
        limit_gib=requested_gib,
        spare_gib=None,
    )


def overhead_band(*, is_eager: bool) -> Band:
    """Least, median and most of what was logged."""
    logged = sorted(one.overhead_gib for one in OBSERVATIONS if one.is_eager == is_eager)
    half = len(logged) // 2
    middle = logged[half] if len(logged) % 2 else (logged[half - 1] + logged[half]) / 2
    return Band(low=logged[0], mid=middle, high=logged[-1])
