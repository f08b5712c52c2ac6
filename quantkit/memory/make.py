"""Model x request -> memory plan. Pure: no file is read and nothing is measured."""

from dataclasses import replace

from quantkit.engines.parallel import ENGINE_VERSIONS
from quantkit.errors import UsageError
from quantkit.families.kv_shape import LatentKv
from quantkit.memory.advice import advise
from quantkit.memory.budget import check_fraction
from quantkit.memory.kv_choice import NO_SPARSE_ATTENTION, choose_format
from quantkit.memory.model import Model
from quantkit.memory.plan import Demand, MemoryPlan, MemoryRequest, Verdict
from quantkit.memory.split import check_split, shares, stages
from quantkit.memory.stages import Serving, plan_stage, planned_requests
from quantkit.memory.verdict import judge

FALLBACK_CONTEXT = 131_072


def make_memory_plan(model: Model, request: MemoryRequest, *, with_advice: bool = True) -> MemoryPlan:
    """The complete plan. Raises UsageError for sizes, layouts and engines that do not go together."""
    scheme = request.scheme or model.scheme
    split = check_split(model, request, scheme)
    check_fraction(request.engine, request.fraction)
    if request.with_mtp and not model.kv_shape.num_mtp_layers:
        raise UsageError(f"{model.name} has no MTP layer", remedy="leave --with-mtp out")
    serving = Serving(
        model=model,
        request=request,
        scheme=scheme,
        groups=model.tensors(scheme),
        kv_format=choose_format(model.kv_shape, request, family=model.family.name),
        demand=_demand(model, request),
        shares=shares(model, request),
    )
    planned = tuple(plan_stage(serving, stage) for stage in stages(model, request))
    low, mid, high = (min(stage.num_tokens[index] for stage in planned) for index in range(3))
    verdict, reasons = judge(serving, planned, (low, mid, high))
    plan = MemoryPlan(
        model=model.name,
        family=model.family.name,
        weights_from=model.weights_from,
        scheme=scheme,
        request=request,
        kv_format=serving.kv_format,
        demand=serving.demand,
        stages=planned,
        num_tokens=(low, mid, high),
        verdict=verdict,
        reasons=reasons,
        advice=(),
        assumptions=_assumptions(serving, mid, split.reason if split.status == "unknown" else ""),
    )
    if with_advice and verdict is not Verdict.FITS:
        return replace(plan, advice=advise(model, plan, make_memory_plan))
    return plan


def _demand(model: Model, request: MemoryRequest) -> Demand:
    """Of one attention replica. vLLM does not start unless the pool holds one request of the context's length."""
    if request.context is not None and model.max_context is not None and request.context > model.max_context:
        raise UsageError(
            f"--context {request.context} is more than the {model.max_context} tokens that the model is made for",
            remedy="give less, or plan from a config.json with a larger max_position_embeddings",
        )
    context = request.context or model.max_context or FALLBACK_CONTEXT
    concurrency = request.concurrency or 1
    per_replica = -(-concurrency // request.parallel.dp_attention)
    is_asked = request.context is not None or request.concurrency is not None or request.engine == "vllm"
    tokens = context * per_replica if is_asked else 0
    return Demand(context=context, concurrency=concurrency, per_replica=per_replica, tokens=tokens)


def _assumptions(serving: Serving, num_tokens: int, split_reason: str) -> tuple[str, ...]:
    """What was taken for granted, in sentences."""
    model, request, scheme = serving.model, serving.request, serving.scheme
    told = [
        f"weights: {model.weights_from}",
        f"{request.engine} {ENGINE_VERSIONS[request.engine]}, with its defaults where no option says otherwise",
        f"{request.gpu.context_gib:.1f} GiB of {request.gpu.title} are gone before the model loads (context and NCCL)",
    ]
    if split_reason:
        told.append(f"{split_reason}: split like the others of its kind")
    if scheme != model.scheme:
        told.append(f"stored as {scheme}, where the source is {model.scheme}")
        if scheme.rest == "fp8" or model.form.int4_group_size is not None:
            told.append("quantkit convert does not write this yet: it decodes what is not INT4 to BF16")
    if scheme.experts == "int4" and scheme.rest == "fp8":
        told.append("the rest as in an FP8 source, kv_b_proj and the indexer included")
    told += _kernel_doubts(serving)
    limit = planned_requests(serving, num_tokens)
    if limit is not None:
        told.append(limit)
    if model.kv_shape.num_mtp_layers and not request.with_mtp:
        told.append("the MTP layer is not loaded (--with-mtp counts it)")
    return tuple(told)


def _kernel_doubts(serving: Serving) -> list[str]:
    """What was read in no engine's source and may not run."""
    architecture = serving.request.gpu.architecture
    doubts = []
    if serving.scheme.experts == "int4" and architecture.is_amd:
        doubts.append(f"whether {serving.request.engine} has a kernel for INT4 experts on {architecture} is not known")
    shape = serving.model.kv_shape
    if isinstance(shape, LatentKv) and shape.is_sparse and architecture in NO_SPARSE_ATTENTION:
        doubts.append(f"no backend for sparse attention on {architecture} is known to work in SGLang")
    return doubts
