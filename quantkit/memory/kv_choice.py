"""Which KV dtype and row layout an engine takes on a GPU, where the user leaves it open.

Facts: SGLang 0.5.23 and vLLM 0.33, read in source.
"""

from quantkit.engines.parallel import EngineName
from quantkit.errors import UsageError
from quantkit.families.kv_shape import KvShape, LatentKv
from quantkit.memory.gpus import Architecture
from quantkit.memory.kv_cache import KvDtype, KvFormat, KvLayout, check_format
from quantkit.memory.plan import MemoryRequest

NO_SPARSE_ATTENTION = (Architecture.SM80, Architecture.SM89)


def choose_format(shape: KvShape, request: MemoryRequest, *, family: str) -> KvFormat:
    """What is asked for, completed by the engine's choice. Raises UsageError for what the engine refuses."""
    engine, architecture = request.engine, request.gpu.architecture
    is_latent = isinstance(shape, LatentKv)
    is_sparse = isinstance(shape, LatentKv) and shape.is_sparse
    if is_sparse and engine == "vllm":
        _check_sparse(architecture, request.kv_dtype)
    if engine == "vllm" and is_latent and request.kv_dtype is KvDtype.FP8 and architecture is Architecture.SM80:
        raise UsageError("vLLM's latent attention on sm80 takes BF16 KV only", remedy="leave --kv-dtype out")
    own_dtype = _own_dtype(engine, architecture, is_sparse=is_sparse, family=family)
    dtype = request.kv_dtype or (own_dtype if request.kv_layout is None else KvDtype.FP8)
    own_layout = _own_layout(engine, architecture, dtype, request.parallel.dcp) if is_sparse else KvLayout.RAW
    options = {"--kv-dtype": request.kv_dtype, "--kv-layout": request.kv_layout}
    given = [name for name, value in options.items() if value is not None]
    whose = f"{engine} on {architecture}"
    found = KvFormat(
        dtype=dtype,
        layout=request.kv_layout or own_layout,
        chosen_by=f"{' and '.join(given)}, the rest by {whose}" if given else whose,
    )
    check_format(shape, found)
    return found


def page_tokens(shape: KvShape, engine: EngineName, architecture: Architecture, dtype: KvDtype) -> int:
    """Tokens of a page or block: the pool holds a whole number of them."""
    if isinstance(shape, LatentKv) and shape.is_sparse:
        return 16 if engine == "vllm" and architecture.is_amd else 64
    if engine == "sglang":
        return 64 if architecture.is_datacenter_blackwell else 1
    if isinstance(shape, LatentKv) and architecture is Architecture.SM90 and dtype is KvDtype.FP8:
        return 64
    return 32 if isinstance(shape, LatentKv) and architecture.is_datacenter_blackwell else 16


def _check_sparse(architecture: Architecture, dtype: KvDtype | None) -> None:
    if architecture in NO_SPARSE_ATTENTION:
        raise UsageError(
            f"vLLM has no sparse-attention backend for {architecture}: it refuses this model there",
            remedy="choose another --gpu, or --engine sglang",
        )
    if architecture is Architecture.SM120 and dtype is KvDtype.BF16:
        raise UsageError(
            "vLLM's sparse attention on sm120 takes FP8 KV only", remedy="give --kv-dtype fp8, or leave it out"
        )


def _own_dtype(engine: EngineName, architecture: Architecture, *, is_sparse: bool, family: str) -> KvDtype:
    if not is_sparse:
        return KvDtype.BF16
    if engine == "sglang":
        is_blackwell = architecture.is_datacenter_blackwell or architecture is Architecture.SM120
        return KvDtype.FP8 if is_blackwell else KvDtype.BF16
    if architecture is Architecture.SM120 or (architecture.is_datacenter_blackwell and family == "glm_moe_dsa"):
        return KvDtype.FP8
    return KvDtype.BF16


def _own_layout(engine: EngineName, architecture: Architecture, dtype: KvDtype, dcp: int) -> KvLayout:
    """Of sparse attention's rows."""
    if dtype is KvDtype.BF16 or architecture.is_amd or architecture.is_datacenter_blackwell:
        return KvLayout.RAW
    if engine == "sglang" and dcp > 1:  # its backends for DCP read raw rows on every GPU
        return KvLayout.RAW
    return KvLayout.PACKED
