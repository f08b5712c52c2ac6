"""SGLang 0.5.23: a fraction of what is free before the model loads goes to weights and pool.

    pool = free after load - free before load x (1 - fraction) - multimodal reservation

The default fraction leaves out an estimate of activations and graphs. What a rank needs beside the pool must fit into
that remainder: a table of every running request's tokens, the graphs, the activations. Read in source.
"""

from dataclasses import dataclass
from fractions import Fraction

from quantkit.errors import UsageError
from quantkit.families.kv_shape import KvShape
from quantkit.memory.budget import GIB, MIB_PER_GIB, Band, Budget, exactly
from quantkit.memory.engine_rules import EngineRules
from quantkit.memory.gpus import Architecture
from quantkit.memory.kv_format import KvDtype, KvLayout
from quantkit.memory.observations import OBSERVATIONS
from quantkit.memory.serving import MemoryRequest, Serving

_CONSTANT_MIB = 512
_MIB_PER_ACTIVATION_TOKEN = 1.5
_FEWEST_ACTIVATION_TOKENS = 2048
_MIB_PER_GRAPH_REQUEST = 2.0
_FLOOR_MIB, _FLOOR_FROM_MIB = 10 * 1024, 60 * 1024
_LATENT_PREFILL_GRAPH_MIB = 1.5 * 1024
_PREFILL_GRAPH_MIB = 8
DRAFT_TOKENS = 4  # EAGLE with three steps, as the recipes start it
DRAFT_REQUESTS = 48
_AITER_FACTOR, _AITER_FROM_TOKENS = 0.85, 8192
_AITER_HEADS = (16, 128)  # a rank's, that AMD's latent-attention kernels take
_MULTIMODAL_GIB = 100 / 1024
_MULTIMODAL_FACTOR = 0.95
_VIT_L = 24 * 1024**2  # layers x hidden^2
_DECODE_GRAPHS_GIB = 1.66  # logged: graphs up to batch 32
_MOST_LOGGED_GIB = max(one.overhead_gib for one in OBSERVATIONS)  # activations and graphs of these models in vLLM
_FEWEST_REQUESTS, _MOST_REQUESTS = 2048, 4096
_TABLE_ENTRY_BYTES = 4
_NO_SPARSE_ATTENTION = (Architecture.SM80, Architecture.SM89)


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


def _budget(serving: Serving, loaded: Band, cell_bytes: float) -> Budget:
    request, demand, free_gib = serving.request, serving.demand, serving.gpu.free_before_load_gib
    fraction = default_fraction(serving) if request.fraction is None else request.fraction
    scales_fraction = _uses_aiter(serving) and demand.context > _AITER_FROM_TOKENS
    if scales_fraction and "fraction" not in request.logged:
        fraction *= _AITER_FACTOR  # of a given fraction too
    static_gib = free_gib * fraction - (_MULTIMODAL_GIB if _vision_complexity(serving) else 0.0)
    pool = loaded.rest_of(static_gib)
    num_requests = running_requests(serving, int(max(pool.mid, 0) * GIB / cell_bytes))
    table_gib = (num_requests + 1) * demand.context * _TABLE_ENTRY_BYTES / GIB
    beside, words = _beside_table(serving)
    overhead = exactly(table_gib) + beside
    plural = "" if num_requests == 1 else "s"
    return Budget(
        fraction=fraction,
        is_default=request.fraction is None,
        rule="pool = free after load - free before load x (1 - fraction)",
        pool=pool,
        overhead=overhead,
        overhead_source=(
            f"table of {num_requests:,} request{plural} ({_whose_requests(serving, num_requests)}) x "
            f"{demand.context:,} tokens x 4 B = {table_gib:.2f} GiB; {words}"
        ),
        limit_gib=static_gib,
        whole_gib=free_gib,
        largest_fraction=1 - overhead.high / free_gib,
        scales_fraction=scales_fraction,
        spare_gib=free_gib * (1 - fraction),
    )


def _beside_table(serving: Serving) -> tuple[Band, str]:
    """Activations and graphs: from what was logged to what SGLang estimates, or to the most that was logged where that
    is less. With the bounds in words."""
    request, estimated_gib = serving.request, _reserved_terms_mib(serving) / MIB_PER_GIB
    has_graphs = request.role != "prefill" and not request.is_eager
    low = _DECODE_GRAPHS_GIB if has_graphs else 0.0
    high = max(low, min(estimated_gib, _MOST_LOGGED_GIB))
    least = f"the decode graphs that were logged ({low} GiB to batch 32)" if has_graphs else "that"
    if high < _MOST_LOGGED_GIB:
        most = f"as SGLang estimates them ({high:.2f} GiB)"
    else:
        most = f"as servers of these models logged ({high} GiB; SGLang estimates {estimated_gib:.2f})"
    words = f"at least {least}, at most activations and graphs {most}"
    return Band(low=low, mid=(low + high) / 2, high=high), words


def default_fraction(serving: Serving) -> float:
    """``--mem-fraction-static`` where it is not given: from the driver's total memory, rounded to 0.001."""
    capacity_mib = serving.gpu.driver_mib
    reserved_mib = _CONSTANT_MIB + _reserved_terms_mib(serving)
    if capacity_mib > _FLOOR_FROM_MIB:
        reserved_mib = max(reserved_mib, _FLOOR_MIB)
    fraction = round((capacity_mib - reserved_mib) / capacity_mib, 3)
    complexity = _vision_complexity(serving)
    if complexity and serving.request.role != "decode":
        # 10 % less for each vision tower of ViT-L's size beyond the first
        fraction *= _MULTIMODAL_FACTOR * max(0.8, min(1.05, 1 - 0.1 * (complexity - 1)))
    return fraction


def running_requests(serving: Serving, num_tokens: int) -> int:
    """Requests that an attention replica has room for: as given, else SGLang's default and no fewer than asked for."""
    given = serving.request.max_running_requests
    if given is not None:
        return max(given // serving.parallel.dp_attention, 1)
    asked = serving.demand.per_replica if serving.demand.tokens else 1
    return max(default_requests(serving, num_tokens), asked)


def _whose_requests(serving: Serving, num_requests: int) -> str:
    """Whose number of running requests it is."""
    request = serving.request
    option = "--max-running-requests"
    if request.max_running_requests is not None:
        return f"{option} as {'logged' if 'max_running_requests' in request.logged else 'given'}"
    if serving.demand.tokens and num_requests == serving.demand.per_replica:
        return "as asked for"
    return f"SGLang's default {option}{' with MTP' if request.with_mtp else ''}"


def default_requests(serving: Serving, num_tokens: int) -> int:
    """``--max-running-requests`` of an attention replica where it is not given."""
    if serving.request.with_mtp:
        return max(DRAFT_REQUESTS // serving.parallel.dp_attention, 1)
    wanted = int(num_tokens / serving.demand.context * 512)
    return min(max(wanted, _FEWEST_REQUESTS), _MOST_REQUESTS, max(num_tokens // 2, 1))


def _reserved_terms_mib(serving: Serving) -> float:
    """Activations, parallelism and graphs."""
    request, parallel = serving.request, serving.parallel
    defaults = next(one for one in _CLASSES if serving.gpu.driver_mib < one.below_mib)
    graph_requests = defaults.graph_requests[1 if parallel.tp >= 4 else 0]
    if request.max_running_requests is not None:
        graph_requests = min(graph_requests, request.max_running_requests)
    tokens = defaults.chunk_tokens
    if request.role == "decode":
        tokens = (request.max_running_requests or graph_requests) * (DRAFT_TOKENS if request.with_mtp else 1)
    mib = _MIB_PER_ACTIVATION_TOKEN * max(tokens, _FEWEST_ACTIVATION_TOKENS)
    mib += parallel.tp * parallel.pp / 8 * 1024
    if request.role != "prefill" and not request.is_eager:
        mib += _MIB_PER_GRAPH_REQUEST * graph_requests
    if request.role != "prefill" and parallel.dp_attention > 1:
        mib += graph_requests * parallel.dp_attention * (4.5 if graph_requests > 300 else 3)
    if request.role != "decode" and _has_prefill_graphs(serving):
        graphs = _num_prefill_graphs(defaults.chunk_tokens)
        mib += _LATENT_PREFILL_GRAPH_MIB if serving.is_latent else _PREFILL_GRAPH_MIB * graphs
    return mib


def _has_prefill_graphs(serving: Serving) -> bool:
    is_plain = serving.parallel.pp == 1 and serving.parallel.dcp == 1
    return is_plain and not serving.request.is_eager and not serving.gpu.architecture.is_amd


def _num_prefill_graphs(chunk_tokens: int) -> int:
    """Captured token counts up to the chunk: ever wider steps."""
    steps = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256), (4608, chunk_tokens, 512))
    return sum(size <= chunk_tokens for first, last, step in steps for size in range(first, last + 1, step))


def _uses_aiter(serving: Serving) -> bool:
    """AMD's attention kernels."""
    takes_latent = not serving.is_latent or serving.heads_per_rank in _AITER_HEADS
    return serving.gpu.architecture.is_amd and not serving.is_sparse and takes_latent


def _vision_complexity(serving: Serving) -> float:
    """A vision tower's layers x hidden^2, in those of ViT-L; 0 without one."""
    model = serving.model
    return model.vision_count("num_hidden_layers") * model.vision_count("hidden_size") ** 2 / _VIT_L


def _check_request(shape: KvShape, request: MemoryRequest) -> None:
    if shape.is_sparse and request.parallel.dcp > 1 and request.role != "both":
        raise UsageError(
            "SGLang's sparse attention knows no DCP in pools of disaggregated serving",
            remedy="leave --dcp or --role out",
        )


def _kv_dtype(shape: KvShape, request: MemoryRequest, family: str) -> KvDtype:
    architecture = request.gpu.architecture
    is_blackwell = architecture.is_datacenter_blackwell or architecture is Architecture.SM120
    return KvDtype.FP8 if shape.is_sparse and is_blackwell else KvDtype.BF16


def _sparse_layout(request: MemoryRequest, dtype: KvDtype) -> KvLayout:
    architecture = request.gpu.architecture
    if dtype is KvDtype.BF16 or architecture.is_amd or architecture.is_datacenter_blackwell:
        return KvLayout.RAW
    # its backends for DCP read raw rows on every GPU
    return KvLayout.RAW if request.parallel.dcp > 1 else KvLayout.PACKED


def _page_tokens(serving: Serving) -> int:
    return 64 if serving.is_sparse or serving.gpu.architecture.is_datacenter_blackwell else 1


def _remarks(serving: Serving, num_tokens: int) -> list[str]:
    told, demand = [], serving.demand
    default = default_requests(serving, num_tokens)
    if demand.tokens and demand.per_replica > default and serving.request.max_running_requests is None:
        total = default * serving.parallel.dp_attention
        told.append(f"started with --max-running-requests {demand.concurrency}: SGLang's default is {total}")
    return told


def _doubts(serving: Serving) -> list[str]:
    architecture = serving.gpu.architecture
    if serving.is_sparse and architecture in _NO_SPARSE_ATTENTION:
        return [f"no backend for sparse attention on {architecture} is known to work in SGLang"]
    return []


SGLANG = EngineRules(
    title="SGLang",
    fraction_option="--mem-fraction-static",
    context_option="--context-length",
    eager_option="--disable-cuda-graph",
    kv_dtype_words={KvDtype.BF16: "bfloat16", KvDtype.FP8: "fp8_e4m3"},
    has_pool_roles=True,
    heads_everywhere=frozenset({"glm4_moe"}),
    deals_out_index=False,
    views_bf16_weights=False,
    keeps_query_slice=True,
    repacked_share=Fraction(2, 3),  # gate and up, then down
    sizes_pool_with_draft_ends=True,
    logs_local_rows=True,
    refuses_below_one_request=False,
    takes_max_running_requests=True,
    buffers=Band(low=0.05, mid=0.35, high=1.0),
    check_request=_check_request,
    kv_dtype=_kv_dtype,
    sparse_layout=_sparse_layout,
    page_tokens=_page_tokens,
    budget=_budget,
    doubts=_doubts,
    remarks=_remarks,
)
