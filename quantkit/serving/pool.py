"""A pool: a checkpoint on some GPUs, with the memory plan and the engine's verdict that its flags are made from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from quantkit.engines.launch import NO_FUSION, Launch
from quantkit.engines.parallel import EngineName, Parallel
from quantkit.engines.schemes import kind_of
from quantkit.engines.verdicts import EngineReport, Outcome
from quantkit.errors import UsageError, VerificationError
from quantkit.families.kv_shape import LatentKv
from quantkit.memory.gpus import Architecture
from quantkit.memory.kv_format import KvDtype, PoolRole
from quantkit.memory.make import decide, make_memory_plan
from quantkit.memory.plan import MemoryPlan
from quantkit.memory.rules import RULES
from quantkit.memory.serving import MemoryRequest
from quantkit.serving.request import ServeRequest, nodes_of
from quantkit.serving.served import Served

_FRACTION_DIGITS = 1000
# capability 90 at least in SGLang (w4afp8.py); exactly that in vLLM (cutlass_moe.py)
_W4A8_GPUS: Mapping[EngineName, tuple[Architecture, ...]] = {
    "sglang": (Architecture.SM90, Architecture.SM100, Architecture.SM103, Architecture.SM120),
    "vllm": (Architecture.SM90,),
}


@dataclass(frozen=True, kw_only=True)
class Pool:
    """``needed``: flags that the engine's contract asks for, with the reason; ``page_tokens``: of a KV page.

    ``draft``: a checkpoint whose draft layers are used in place of its own.
    """

    role: PoolRole
    served: Served
    plan: MemoryPlan
    report: EngineReport
    backend: str
    page_tokens: int
    needed: tuple[tuple[str, str], ...] = ()
    draft: Served | None = None

    @property
    def parallel(self) -> Parallel:
        return self.plan.request.parallel

    @property
    def num_nodes(self) -> int:
        return nodes_of(self.parallel)

    @property
    def is_sparse(self) -> bool:
        return self.served.model.kv_shape.is_sparse


def make_pool(request: ServeRequest, served: Served, role: PoolRole, *, has_mtp: bool) -> Pool:
    """Planned and checked. Raises UsageError for sizes that the engine refuses, VerificationError for a checkpoint."""
    is_prefill = role == "prefill"
    parallel = Parallel(tp=request.prefill_tp or request.parallel.tp) if is_prefill else request.parallel
    backend = "none" if is_prefill else request.backend
    if backend != "none":
        parallel = replace(parallel, ep=parallel.tp)
    rules = RULES[request.engine]
    concurrency = None if is_prefill else request.concurrency
    running = None if is_prefill else request.max_running_requests or concurrency
    asked = MemoryRequest(
        gpu=request.gpu,
        engine=request.engine,
        parallel=parallel,
        scheme=served.scheme,
        fraction=None if is_prefill else request.fraction,
        kv_dtype=request.kv_dtype or _usual_kv_dtype(request, served),
        role=role,
        with_mtp=has_mtp and served.has_mtp,
        context=request.context,
        concurrency=concurrency,
        max_running_requests=running if rules.takes_max_running_requests else None,
    )
    nodes_of(parallel)
    _check_gpu(request, served)
    plan = _with_fraction(served, asked)
    needed, report = _verdict(served, Launch(engine=request.engine, parallel=parallel, backend=backend))
    return Pool(
        role=role,
        served=served,
        plan=plan,
        report=report,
        backend=backend,
        page_tokens=rules.page_tokens(decide(served.model, plan.request)),
        needed=needed,
    )


def _check_gpu(request: ServeRequest, served: Served) -> None:
    """Raise VerificationError where the engine has no kernel for the experts' FP8 activations on this GPU."""
    kind, architecture = kind_of(served.config), request.gpu.architecture
    if kind not in ("w4a8", "w4afp8"):
        return
    able = _W4A8_GPUS[request.engine]
    if architecture not in able:
        words = " or ".join(one.value for one in able)
        raise VerificationError(
            f"{request.engine} runs INT4 experts with FP8 activations on {words}, not on {architecture}",
            file=served.path,
            remedy="choose another --gpu, or convert without --activations and --format w4afp8",
        )


def _usual_kv_dtype(request: ServeRequest, served: Served) -> KvDtype | None:
    """FP8 where a row is latent: normed values, or scales of its own; elsewhere no scale is known, and the engine's."""
    is_latent = isinstance(served.model.kv_shape, LatentKv)
    return KvDtype.FP8 if is_latent and request.gpu.architecture is not Architecture.SM80 else None


def _with_fraction(served: Served, asked: MemoryRequest) -> MemoryPlan:
    """Planned with the fraction that will be printed: the engine's own, in three digits."""
    plan = make_memory_plan(served.model, asked)
    budget = plan.tightest.budget
    if not budget.is_default or budget.scales_fraction:
        return plan
    digits = math.floor(budget.fraction * _FRACTION_DIGITS + 1e-9) / _FRACTION_DIGITS
    return make_memory_plan(served.model, replace(asked, fraction=digits))


def _verdict(served: Served, launch: Launch) -> tuple[tuple[tuple[str, str], ...], EngineReport]:
    """Flags that the contract asks for, and what it says with them. Raises VerificationError for a refusal."""
    report = served.check(launch)
    needed = []
    for row in report.with_outcome(Outcome.FLAG):
        if NO_FUSION in row.example.remedy:
            needed.append((NO_FUSION, row.example.message))
    if needed:
        report = served.check(replace(launch, flags=tuple(name for name, _ in needed)))
    for row in report.bad_rows[:1]:
        raise VerificationError(
            f"{report.engine} {report.version}: {row.name}: {row.example.message} ({row.example.outcome.value})",
            tensor=row.example.tensor,
            file=served.path,
            remedy=row.example.remedy or "convert it for this engine, or serve it with another",
        )
    return tuple(needed), report


def speculates(asked: bool | None, pools: tuple[Served, ...], draft: Served | None) -> bool:
    """Whether the deployment speculates: where ``asked`` is None, if it can. ``pools`` ends with OUTPUT's.

    Raises UsageError where it is told to and cannot.
    """
    remedy = "leave --mtp and --draft out, or name checkpoints that have draft layers"
    lacking = [one for one in (*pools[:-1], draft or pools[-1]) if not one.has_mtp]
    if lacking and (asked or draft is not None):
        raise UsageError(f"{lacking[0].path} has no MTP layer, and both pools speculate alike", remedy=remedy)
    return not lacking if asked is None else asked
