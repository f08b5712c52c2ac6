"""What would make it fit: each change is planned, and only those that help are told."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from quantkit.errors import QuantkitError
from quantkit.memory.gpus import GPUS
from quantkit.memory.kv_format import KvDtype
from quantkit.memory.model import Model
from quantkit.memory.plan import MemoryPlan, Verdict
from quantkit.memory.rules import RULES
from quantkit.memory.scheme import GROUP_SIZES, Scheme
from quantkit.memory.serving import MemoryRequest
from quantkit.memory.split import legal_tp_sizes

Make = Callable[..., MemoryPlan]


def advise(model: Model, plan: MemoryPlan, make: Make) -> tuple[str, ...]:
    """Single changes after which the verdict is better, in words. ``make`` plans a changed request."""
    told = []
    for words, request in _changes(model, plan):
        try:
            changed = make(model, request, with_advice=False)
        except QuantkitError:  # a change that the engine or the model refuses is no advice
            continue
        if changed.verdict.severity < plan.verdict.severity:
            how = "fits" if changed.verdict is Verdict.FITS else "fits, but tightly"
            told.append(f"{words}: {how}, {changed.num_tokens.mid:,} tokens a rank")
    return tuple(told)


def _changes(model: Model, plan: MemoryPlan) -> Iterator[tuple[str, MemoryRequest]]:
    request, scheme = plan.request, plan.scheme
    yield from _scheme_changes(model, request, scheme)
    if plan.kv_format.dtype is KvDtype.BF16:
        yield "FP8 KV cache (--kv-dtype fp8)", replace(request, kv_dtype=KvDtype.FP8)
    if request.with_mtp:
        yield "without MTP", replace(request, with_mtp=False)
    larger = [tp for tp in legal_tp_sizes(model, request, scheme) if tp > request.parallel.tp]
    for tp in larger[:2]:
        ep = tp if request.parallel.ep == request.parallel.tp else request.parallel.ep
        words = f"--tp {tp}" if ep == request.parallel.ep else f"--tp {tp} --ep {ep}"
        parallel = replace(request.parallel, tp=tp, ep=ep)
        yield f"{words} ({parallel.num_gpus} GPUs)", replace(request, parallel=parallel)
    yield from _split_changes(request)
    yield from _demand_changes(plan)
    option = RULES[request.engine].fraction_option
    for fraction in (0.85, 0.9, 0.92, 0.94, 0.96):
        yield f"{option} {fraction:g}", replace(request, fraction=fraction, logged=request.logged - {"fraction"})
    instead = "" if request.gpu == GPUS[request.gpu.name] else " and no --gpu-gib"
    for gpu in GPUS.values():
        if gpu.total_gib > request.gpu.total_gib and gpu.architecture.is_amd == request.gpu.architecture.is_amd:
            yield f"--gpu {gpu.name}{instead}", replace(request, gpu=gpu)


def _split_changes(request: MemoryRequest) -> Iterator[tuple[str, MemoryRequest]]:
    """On as many GPUs, or on twice as many; what the engine refuses falls out."""
    parallel = request.parallel
    if parallel.dp_attention == 1 and parallel.tp > 1:
        changed = replace(parallel, dp_attention=parallel.tp, ep=parallel.tp)
        yield f"--dp-attention {parallel.tp} --ep {parallel.tp}", replace(request, parallel=changed)
    if parallel.dcp == 1 and parallel.attention_tp > 1:
        changed = replace(parallel, dcp=parallel.attention_tp)
        yield f"--dcp {parallel.attention_tp}", replace(request, parallel=changed)
    twice = replace(parallel, pp=2 * parallel.pp)
    yield f"--pp {twice.pp} ({twice.num_gpus} GPUs)", replace(request, parallel=twice)


def _scheme_changes(model: Model, request: MemoryRequest, scheme: Scheme) -> Iterator[tuple[str, MemoryRequest]]:
    if scheme.experts != "int4":
        int4 = Scheme(experts="int4", rest="bf16", group_size=GROUP_SIZES[0])
        yield "INT4 experts (--to int4)", replace(request, scheme=int4)
        if request.kv_dtype is not KvDtype.FP8:
            words = "INT4 experts and an FP8 KV cache (--to int4 --kv-dtype fp8)"
            yield words, replace(request, scheme=int4, kv_dtype=KvDtype.FP8)
        return
    if scheme.rest == "bf16" and model.form.int4_group_size is None:
        yield (
            "the rest in FP8 (--rest fp8)",
            replace(request, scheme=replace(scheme, rest="fp8")),
        )
    for group_size in GROUP_SIZES:
        if scheme.group_size is not None and group_size > scheme.group_size:
            yield f"--group-size {group_size}", replace(request, scheme=replace(scheme, group_size=group_size))


def _demand_changes(plan: MemoryPlan) -> Iterator[tuple[str, MemoryRequest]]:
    request, demand = plan.request, plan.demand
    fitting = plan.num_tokens.low // demand.context * request.parallel.dp_attention
    if 0 < fitting < (request.concurrency or 1):
        yield f"fewer requests (--concurrency {fitting})", replace(request, concurrency=fitting)
    what = "asking for less than the model's context" if request.context is None else "a shorter context"
    context = plan.num_tokens.low // demand.per_replica // 1024 * 1024
    if 0 < context < demand.context:
        yield f"{what} (--context {context})", replace(request, context=context)
    if demand.tokens == 0 and demand.context > 131_072:
        yield f"{what} (--context 131072)", replace(request, context=131_072)
