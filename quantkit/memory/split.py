"""Whether and how an engine splits a model: the checks that come before any arithmetic."""

from collections.abc import Iterator
from dataclasses import replace

from quantkit.engines.parallel import MOST_GPUS, Parallel, Shares, shares_of
from quantkit.engines.schemes import kind_of
from quantkit.engines.tensor_parallel import TP_SIZES, Storage, TpVerdict, split_verdict
from quantkit.errors import UsageError
from quantkit.families.kv_shape import HeadKv
from quantkit.memory.model import Model
from quantkit.memory.scheme import GROUP_SIZES, Scheme
from quantkit.memory.serving import MemoryRequest

SIZE_OPTIONS = {"tp": "--tp", "ep": "--ep", "pp": "--pp", "dp_attention": "--dp-attention", "dcp": "--dcp"}


def check_sizes(parallel: Parallel) -> None:
    """Raise UsageError for what is no size."""
    for field, option in SIZE_OPTIONS.items():
        size = getattr(parallel, field)
        if not 1 <= size <= MOST_GPUS:
            raise UsageError(f"{option} {size} is no size", remedy=f"give one from 1 to {MOST_GPUS}")
    if parallel.num_gpus > MOST_GPUS:
        raise UsageError(
            f"--tp {parallel.tp} and --pp {parallel.pp} make {parallel.num_gpus} GPUs",
            remedy=f"plan for {MOST_GPUS} at most",
        )


def check_split(model: Model, request: MemoryRequest, scheme: Scheme) -> TpVerdict:
    """The engine's verdict. Raises UsageError with the rule and the legal sizes where it refuses."""
    parallel = request.parallel
    verdict = _verdict(model, request, scheme, parallel)
    if verdict.status == "refused":
        legal = "; ".join(_legal_changes(model, request, scheme))
        # replicas that do not divide have no flags in vLLM's words
        is_whole = parallel.tp % parallel.dp_attention == 0
        words = (
            parallel.flags(request.engine) if is_whole else f"--tp {parallel.tp} --dp-attention {parallel.dp_attention}"
        )
        raise UsageError(
            f"{request.engine} cannot split {model.name} ({scheme}) with {words}: {verdict.reason}",
            remedy=f"legal, all else equal: {legal}" if legal else "change several of the sizes",
        )
    return verdict


def _legal_changes(model: Model, request: MemoryRequest, scheme: Scheme) -> Iterator[str]:
    """Values of each option with which the engine takes the split."""
    for field, option in SIZE_OPTIONS.items():
        if field == "tp" or getattr(request.parallel, field) > 1:
            taken = [
                str(size)
                for size in TP_SIZES
                if _is_taken(model, request, scheme, replace(request.parallel, **{field: size}))
            ]
            if taken:
                yield f"{option} {', '.join(taken)}"
    if request.parallel.ep == 1 and _is_taken(
        model, request, scheme, replace(request.parallel, ep=request.parallel.tp)
    ):
        yield f"--ep {request.parallel.tp}"
    groups = [
        str(size)
        for size in GROUP_SIZES
        if scheme.group_size is not None
        and model.form.int4_group_size is None
        and _is_taken(model, request, replace(scheme, group_size=size), request.parallel)
    ]
    if groups:
        yield f"--group-size {', '.join(groups)}"


def _is_taken(model: Model, request: MemoryRequest, scheme: Scheme, parallel: Parallel) -> bool:
    return _verdict(model, request, scheme, parallel).status != "refused"


def legal_tp_sizes(model: Model, request: MemoryRequest, scheme: Scheme) -> tuple[int, ...]:
    """TP sizes that the engine takes, all else equal."""
    return tuple(tp for tp in TP_SIZES if _is_taken(model, request, scheme, replace(request.parallel, tp=tp)))


def shares(model: Model, request: MemoryRequest) -> Shares:
    """Ranks that each kind of weight is cut over."""
    shape = model.kv_shape
    return shares_of(
        request.parallel,
        request.engine,
        family=model.family.name,
        num_kv_heads=shape.num_kv_heads if isinstance(shape, HeadKv) else request.parallel.attention_tp,
        num_vision_heads=model.vision_count("num_attention_heads"),
    )


def _verdict(model: Model, request: MemoryRequest, scheme: Scheme, parallel: Parallel) -> TpVerdict:
    form = model.form if scheme == model.scheme else scheme.form
    # blocks over whole rows or columns are cut anywhere
    block = max((cols or 0 for _, cols in form.fp8_blocks), default=0) or None
    storage = Storage(
        group_size=scheme.group_size,
        kind=kind_of(model.config) if scheme == model.scheme else "w4a16",
        expert_block=block if scheme.experts == "fp8" else None,
        rest_block=None if scheme.rest == "bf16" else block,
    )
    return split_verdict(
        family=model.family, config=model.config, parallel=parallel, storage=storage, engine=request.engine
    )
