"""vLLM 0.33.0: a fraction of the GPU's total is the budget, and the pool is what a profiling pass leaves of it.

    pool = total x utilization - (weights + everything the pass used) - estimate for CUDA graphs

What the pass uses depends on the batch it is run with, so the overhead is a band of what servers logged. Read in
source.
"""

from fractions import Fraction

from quantkit.errors import UsageError
from quantkit.families.kv_shape import KvShape, LatentKv
from quantkit.memory.budget import Band, Budget, exactly
from quantkit.memory.engine_rules import EngineRules
from quantkit.memory.gpus import Architecture
from quantkit.memory.kv_format import KvDtype, KvLayout
from quantkit.memory.observations import observations_of, overhead_band
from quantkit.memory.serving import MemoryRequest, Serving

DEFAULT_UTILIZATION = 0.92
_NO_SPARSE_ATTENTION = (Architecture.SM80, Architecture.SM89)


def _budget(serving: Serving, loaded: Band, cell_bytes: float) -> Budget:
    request, gpu = serving.request, serving.gpu
    utilization = DEFAULT_UTILIZATION if request.fraction is None else request.fraction
    requested_gib = gpu.total_gib * utilization
    overhead = overhead_band(gpu, is_eager=request.is_eager, is_latent=serving.is_latent)
    observations = observations_of(is_eager=request.is_eager)
    logged = "; ".join(f"{one.overhead_gib} GiB ({one.server})" for one in observations)
    return Budget(
        fraction=utilization,
        is_default=request.fraction is None,
        rule="pool = total x utilization - weights - what the profiling pass and the CUDA graphs use",
        pool=(loaded + overhead).rest_of(requested_gib),
        overhead=overhead,
        overhead_source=f"logged: {logged}; {overhead.mid:g} GiB is the median of what is nearest to {gpu.title}",
        limit_gib=requested_gib,
        whole_gib=gpu.total_gib,
        largest_fraction=gpu.free_before_load_gib / gpu.total_gib,  # it refuses to start above
        scales_fraction=False,
        spare_gib=None,
    )


def _check_request(shape: KvShape, request: MemoryRequest) -> None:
    architecture = request.gpu.architecture
    if not isinstance(shape, LatentKv):
        return
    if shape.is_sparse and architecture in _NO_SPARSE_ATTENTION:
        raise UsageError(
            f"vLLM has no sparse-attention backend for {architecture}: it refuses this model there",
            remedy="choose another --gpu",
        )
    if shape.is_sparse and architecture is Architecture.SM120 and request.kv_dtype is KvDtype.BF16:
        raise UsageError(
            "vLLM's sparse attention on sm120 takes FP8 KV only", remedy="give --kv-dtype fp8, or leave it out"
        )
    if architecture is Architecture.SM80 and request.kv_dtype is KvDtype.FP8:
        raise UsageError("vLLM's latent attention on sm80 takes BF16 KV only", remedy="leave --kv-dtype out")


def _kv_dtype(shape: KvShape, request: MemoryRequest, family: str) -> KvDtype:
    architecture = request.gpu.architecture
    if not shape.is_sparse:
        return KvDtype.BF16
    is_glm_on_blackwell = architecture.is_datacenter_blackwell and family == "glm_moe_dsa"
    return KvDtype.FP8 if is_glm_on_blackwell or architecture is Architecture.SM120 else KvDtype.BF16


def _sparse_layout(request: MemoryRequest, dtype: KvDtype) -> KvLayout:
    architecture = request.gpu.architecture
    is_raw = dtype is KvDtype.BF16 or architecture.is_amd or architecture.is_datacenter_blackwell
    return KvLayout.RAW if is_raw else KvLayout.PACKED


def _page_tokens(serving: Serving) -> int:
    architecture = serving.gpu.architecture
    if serving.is_sparse:
        return 16 if architecture.is_amd else 64
    if serving.is_latent and architecture is Architecture.SM90 and serving.kv_format.dtype is KvDtype.FP8:
        return 64
    return 32 if serving.is_latent and architecture.is_datacenter_blackwell else 16


VLLM = EngineRules(
    title="vLLM",
    fraction_option="--gpu-memory-utilization",
    context_option="--max-model-len",
    eager_option="--enforce-eager",
    kv_dtype_words={KvDtype.BF16: "bfloat16", KvDtype.FP8: "fp8"},
    has_pool_roles=False,
    heads_everywhere=frozenset(),
    deals_out_index=True,
    views_bf16_weights=True,
    keeps_query_slice=False,
    repacked_share=Fraction(1),
    sizes_pool_with_draft_ends=False,
    logs_local_rows=False,
    refuses_below_one_request=True,
    takes_max_running_requests=False,
    buffers=exactly(0.0),
    check_request=_check_request,
    kv_dtype=_kv_dtype,
    sparse_layout=_sparse_layout,
    page_tokens=_page_tokens,
    budget=_budget,
    doubts=lambda serving: [],
    remarks=lambda serving, num_tokens: [],
)
