"""SGLang 0.5.23: a fraction of what is free before the model loads goes to weights and pool.

    pool = free after load - free before load x (1 - fraction) - multimodal reservation

The default fraction leaves out an estimate of activations and graphs. What a rank needs beside the pool must fit into
that remainder: a table of every running request's tokens, the graphs, the activations.
"""

from dataclasses import dataclass

from quantkit.memory.budget import MIB_PER_GIB, Band, Budget, Server
from quantkit.memory.vllm_budget import OBSERVATIONS

_CONSTANT_MIB = 512
_MIB_PER_ACTIVATION_TOKEN = 1.5
_FEWEST_ACTIVATION_TOKENS = 2048
_MIB_PER_GRAPH_REQUEST = 2.0
_FLOOR_MIB, _FLOOR_FROM_MIB = 10 * 1024, 60 * 1024
_LATENT_PREFILL_GRAPH_MIB = 1.5 * 1024
_PREFILL_GRAPH_MIB = 8
_DRAFT_TOKENS = 4  # EAGLE with three steps, as the recipes start it
_DRAFT_REQUESTS = 48
_AITER_FACTOR, _AITER_FROM_TOKENS = 0.85, 8192
_MULTIMODAL_GIB = 100 / 1024
_MULTIMODAL_FACTOR = 0.95
_DECODE_GRAPHS_GIB = 1.66  # logged: graphs up to batch 32
_MOST_LOGGED_GIB = max(one.overhead_gib for one in OBSERVATIONS)  # activations and graphs of these models in vLLM
_FEWEST_REQUESTS, _MOST_REQUESTS = 2048, 4096
_TABLE_ENTRY_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Class:
    """Defaults for GPUs of less than ``below_mib``: prefill chunk, largest decode graph below TP4 and from it."""

    below_mib: float
    chunk_tokens: int
    graph_requests: tuple[int, int]


_CLASSES = (
    _Class(20 * 1024, 2048, (8, 8)),
    _Class(35 * 1024, 4096, (48, 160)),
    _Class(60 * 1024, 4096, (32, 160)),
    _Class(160 * 1024, 8192, (256, 512)),
    _Class(float("inf"), 16_384, (512, 512)),
)


def sglang_budget(server: Server, loaded: Band, cell_bytes: float) -> Budget:
    """``loaded``: weights, copies and buffers; ``cell_bytes``: of a token on the rank."""
    fraction = default_fraction(server) if server.fraction is None else server.fraction
    if server.uses_aiter and server.context > _AITER_FROM_TOKENS:
        fraction *= _AITER_FACTOR  # of a given fraction too
    free_gib = server.gpu.free_before_load_gib
    static_gib = free_gib * fraction - (0.0 if server.vision_complexity is None else _MULTIMODAL_GIB)
    pool = Band(low=static_gib - loaded.high, mid=static_gib - loaded.mid, high=static_gib - loaded.low)
    num_requests = running_requests(server, int(max(pool.mid, 0) * 2**30 / cell_bytes))
    table_gib = (num_requests + 1) * server.context * _TABLE_ENTRY_BYTES / 2**30
    low = table_gib + (0 if server.role == "prefill" else _DECODE_GRAPHS_GIB)
    high = table_gib + min(_reserved_terms_mib(server) / MIB_PER_GIB, _MOST_LOGGED_GIB)
    return Budget(
        fraction=fraction,
        is_default=server.fraction is None,
        rule="pool = free after load - free before load x (1 - fraction)",
        pool=pool,
        overhead=Band(low=low, mid=(low + high) / 2, high=max(low, high)),
        overhead_source=(
            f"table of {num_requests:,} requests x {server.context:,} tokens x 4 B = {table_gib:.2f} GiB; at "
            "least the decode graphs that were logged (1.66 GiB to batch 32), at most activations and graphs as SGLang "
            f"estimates them or as servers of these models logged ({_MOST_LOGGED_GIB} GiB)"
        ),
        limit_gib=static_gib,
        spare_gib=free_gib * (1 - fraction),
    )


def default_fraction(server: Server) -> float:
    """``--mem-fraction-static`` where it is not given: from the driver's total memory, rounded to 0.001."""
    capacity_mib = server.gpu.driver_mib
    reserved_mib = _CONSTANT_MIB + _reserved_terms_mib(server)
    if capacity_mib > _FLOOR_FROM_MIB:
        reserved_mib = max(reserved_mib, _FLOOR_MIB)
    fraction = round((capacity_mib - reserved_mib) / capacity_mib, 3)
    if server.vision_complexity is not None and server.role != "decode":
        # 10 % less for each vision tower of ViT-L's size beyond the first
        fraction *= _MULTIMODAL_FACTOR * max(0.8, min(1.05, 1 - 0.1 * (server.vision_complexity - 1)))
    return fraction


def running_requests(server: Server, num_tokens: int) -> int:
    """Requests that an attention replica has room for: as given, else SGLang's default and no fewer than asked for."""
    if server.max_running_requests is not None:
        return max(server.max_running_requests // server.parallel.dp_attention, 1)
    return max(default_requests(server, num_tokens), server.concurrency)


def default_requests(server: Server, num_tokens: int) -> int:
    """``--max-running-requests`` of an attention replica where it is not given."""
    if server.with_mtp:
        return max(_DRAFT_REQUESTS // server.parallel.dp_attention, 1)
    wanted = int(num_tokens / server.context * 512)
    return min(max(wanted, _FEWEST_REQUESTS), _MOST_REQUESTS, max(num_tokens // 2, 1))


def _reserved_terms_mib(server: Server) -> float:
    """Activations, parallelism and graphs."""
    defaults = next(one for one in _CLASSES if server.gpu.driver_mib < one.below_mib)
    parallel = server.parallel
    graph_requests = defaults.graph_requests[parallel.tp >= 4]
    if server.max_running_requests is not None:
        graph_requests = min(graph_requests, server.max_running_requests)
    tokens = defaults.chunk_tokens
    if server.role == "decode":
        tokens = (server.max_running_requests or graph_requests) * (_DRAFT_TOKENS if server.with_mtp else 1)
    mib = _MIB_PER_ACTIVATION_TOKEN * max(tokens, _FEWEST_ACTIVATION_TOKENS)
    mib += parallel.tp * parallel.pp / 8 * 1024
    if server.role != "prefill" and not server.is_eager:
        mib += _MIB_PER_GRAPH_REQUEST * graph_requests
    if server.role != "prefill" and parallel.dp_attention > 1:
        mib += graph_requests * parallel.dp_attention * (4.5 if graph_requests > 300 else 3)
    if server.role != "decode" and _has_prefill_graphs(server):
        graphs = _num_prefill_graphs(defaults.chunk_tokens)
        mib += _LATENT_PREFILL_GRAPH_MIB if server.is_latent else _PREFILL_GRAPH_MIB * graphs
    return mib


def _has_prefill_graphs(server: Server) -> bool:
    is_plain = server.parallel.pp == 1 and server.parallel.dcp == 1
    return is_plain and not server.is_eager and not server.gpu.architecture.is_amd


def _num_prefill_graphs(chunk_tokens: int) -> int:
    """Captured token counts up to the chunk: ever wider steps."""
    steps = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256), (4608, chunk_tokens, 512))
    return sum(size <= chunk_tokens for first, last, step in steps for size in range(first, last + 1, step))
