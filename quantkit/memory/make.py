"""Model x request -> memory plan. Pure: no file is read and nothing is measured."""

from dataclasses import replace

from quantkit.engines.parallel import ENGINE_VERSIONS, EngineName, stage_layers
from quantkit.errors import UsageError
from quantkit.families.kv_shape import HeadKv
from quantkit.memory.advice import advise
from quantkit.memory.engine_rules import EngineRules
from quantkit.memory.kv_choice import choose_format
from quantkit.memory.launch import logged_flags
from quantkit.memory.model import Model
from quantkit.memory.plan import MemoryPlan, Tokens, Verdict
from quantkit.memory.rules import RULES
from quantkit.memory.serving import Demand, MemoryRequest, Serving
from quantkit.memory.split import check_sizes, check_split, shares
from quantkit.memory.stage import stages
from quantkit.memory.stages import plan_stage
from quantkit.memory.tensor_groups import by_layer
from quantkit.memory.verdict import judge

FALLBACK_CONTEXT = 131_072
NOT_WRITTEN_YET = "quantkit convert does not write this yet: it writes INT4 experts, and the rest in BF16 or in FP8"


def decide(model: Model, request: MemoryRequest) -> Serving:
    """Everything that the request left open. Raises UsageError for what does not go together."""
    rules = RULES[request.engine]
    scheme = request.scheme or model.scheme
    check_sizes(request.parallel)
    if model.form.int4_group_size is not None:
        model.tensors(scheme)  # a group size that divides nothing is the source's fault, and none of the split
    split = check_split(model, request, scheme)
    check_fraction(request.engine, request.fraction)
    groups = by_layer(model.tensors(scheme))
    mtp_layers = range(model.num_layers, model.num_layers + model.num_mtp_layers)
    if request.with_mtp and groups.keys().isdisjoint(mtp_layers):
        raise UsageError(f"{model.name} has no MTP layer", remedy="leave --with-mtp out")
    return Serving(
        model=model,
        request=request,
        scheme=scheme,
        split=split,
        groups=groups,
        kv_format=choose_format(model, request, rules),
        demand=_demand(model, request, rules),
        shares=shares(model, request),
    )


def check_fraction(engine: EngineName, fraction: float | None) -> None:
    """Raise UsageError for what is no share of a GPU."""
    if fraction is not None and not 0 < fraction <= 1:
        option = RULES[engine].fraction_option
        raise UsageError(f"{option} {fraction:g} is no share of a GPU", remedy="give 0.88, say")


def make_memory_plan(model: Model, request: MemoryRequest, *, with_advice: bool = True) -> MemoryPlan:
    """The complete plan. Raises UsageError for sizes, layouts and engines that do not go together."""
    rules = RULES[request.engine]
    serving = decide(model, request)
    planned = tuple(plan_stage(serving, stage, rules) for stage in stages(model, request, rules))
    num_tokens = Tokens(*(min(ends) for ends in zip(*(stage.num_tokens for stage in planned), strict=True)))
    verdict, reasons = judge(serving, planned, num_tokens, rules)
    plan = MemoryPlan(
        model=model.name,
        family=model.family.name,
        weights_from=model.weights_from,
        scheme=serving.scheme,
        request=request,
        kv_format=serving.kv_format,
        demand=serving.demand,
        stages=planned,
        num_tokens=num_tokens,
        verdict=verdict,
        reasons=reasons,
        advice=(),
        assumptions=_assumptions(serving, num_tokens.mid),
    )
    if with_advice and verdict is not Verdict.FITS:
        return replace(plan, advice=advise(model, plan, make_memory_plan))
    return plan


def _demand(model: Model, request: MemoryRequest, rules: EngineRules) -> Demand:
    """What the user asks for, and what the engine asks for to start."""
    if request.context is not None and model.max_context is not None and request.context > model.max_context:
        raise UsageError(
            f"--context {request.context} is more than the {model.max_context} tokens that the model is made for",
            remedy="give less, or plan from a config.json with a larger max_position_embeddings",
        )
    context = request.context or model.max_context or FALLBACK_CONTEXT
    concurrency = request.concurrency or 1
    per_replica = -(-concurrency // request.parallel.dp_attention)
    # with nothing asked for, what the engine wants to start with
    is_wanted = not request.asks_for_nothing or rules.refuses_below_one_request
    tokens = context * per_replica if is_wanted else 0
    return Demand(context=context, concurrency=concurrency, per_replica=per_replica, tokens=tokens)


def _assumptions(serving: Serving, num_tokens: int) -> tuple[str, ...]:
    """What was taken for granted, in sentences."""
    model, request, scheme = serving.model, serving.request, serving.scheme
    told = [
        f"weights: {model.weights_from}",
        f"{request.engine} {ENGINE_VERSIONS[request.engine]}, with its defaults where no option says otherwise",
        f"{request.gpu.context_gib:.1f} GiB of {request.gpu.title} are gone before the model loads (context and NCCL)",
    ]
    if read := logged_flags(request):
        told.append(f"read from the log: {read}")
    told += model.remarks
    told += _unevenness(serving)
    if serving.split.status == "unknown":
        told.append(f"{serving.split.reason}: split like the others of its kind")
    if scheme != model.scheme:
        told.append(f"stored as {scheme}, where the source is {model.scheme}")
        if scheme.experts != "int4" or model.form.int4_group_size is not None:
            told.append(NOT_WRITTEN_YET)
    if scheme.experts == "int4" and request.gpu.architecture.is_amd:
        architecture = request.gpu.architecture
        told.append(f"whether {request.engine} has a kernel for INT4 experts on {architecture} is not known")
    told += RULES[request.engine].doubts(serving)
    told += RULES[request.engine].remarks(serving, num_tokens)
    if model.num_mtp_layers and not request.with_mtp:
        told.append("the MTP layer is not loaded (--with-mtp counts it)")
    return tuple(told)


def _unevenness(serving: Serving) -> list[str]:
    """What is not split evenly, and how the engine does it instead."""
    told, parallel, shape = [], serving.parallel, serving.kv_shape
    spans = stage_layers(serving.model.num_layers, parallel.pp, serving.request.engine)
    counts = [last - first for first, last in spans]
    if len(set(counts)) > 1:
        words = ", ".join(map(str, counts))
        layers, engine = serving.model.num_layers, serving.request.engine
        told.append(f"{layers} layers over {parallel.pp} stages: {words}, as {engine} does")
    if isinstance(shape, HeadKv) and parallel.attention_tp > shape.num_kv_heads:
        times = parallel.attention_tp // shape.num_kv_heads
        told.append(f"{shape.num_kv_heads} KV heads over {parallel.attention_tp} ranks: each stands on {times} of them")
    return told
