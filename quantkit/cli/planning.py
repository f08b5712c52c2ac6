"""From options to a Plan: shared by `plan` and `convert`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.calibrated.needs import CalibrationNeeds, calibration_needs, check_disk
from quantkit.cli.options import check_engine_name
from quantkit.cli.recipe_options import RecipeOptions
from quantkit.engines.mixed import BLOCK
from quantkit.engines.schemes import kind_of
from quantkit.engines.tensor_parallel import TpVerdict, legal_tp
from quantkit.engines.verdicts import EngineReport
from quantkit.families.family import Role
from quantkit.importance.open import open_importance
from quantkit.machine import uncollected
from quantkit.module_names import experts_in
from quantkit.plan.importance import with_importance
from quantkit.plan.input_scales import read_input_scales
from quantkit.plan.limits import Limits
from quantkit.plan.make import make_plan
from quantkit.plan.part import limited
from quantkit.plan.plan import Plan
from quantkit.plan.relayout import check_declares, check_moves, native_settings
from quantkit.plan.resources import Workers
from quantkit.plan.same_model import check_statistics
from quantkit.recipe import override
from quantkit.sources import ResolvedSource, resolve_headers, resolve_source
from quantkit.verify.loading import check_plan, launches_of, refuse_unservable

_MANY = 1 << 20  # experts of a family whose configs do not say


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the command line asked for."""

    source: str | None
    options: RecipeOptions = RecipeOptions()  # noqa: RUF009  (frozen)
    config: Path | None = None
    only_moves: bool = False  # INT4 that is there, and nothing becomes INT4
    limits: Limits | None = None  # of a smoke run
    keep_source: bool = False  # its shards are wanted here, and nothing but headers yet


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDescription:
    """A plan with what is to be known before it is executed.

    ``tp``: legal sizes; ``loading``: what engines make of it; ``calibration``: needs of every way to do it, where its
    method sees inputs.
    """

    plan: Plan
    tp: Sequence[TpVerdict]
    loading: Sequence[EngineReport]
    workers: Workers
    calibration: Sequence[CalibrationNeeds]


def plan_request(request: PlanRequest) -> tuple[ResolvedSource, Plan]:
    """Resolve the source, apply the overrides, plan. Of a hub repository headers are read, and no more."""
    options = request.options
    check_engine_name(options.engine)
    with uncollected():
        if request.config is None:
            resolved = resolve_headers(request.source, recipe=options.recipe, keep_source=request.keep_source)
        else:
            resolved = resolve_source(request.source, recipe=options.recipe, config=request.config)
        return resolved, _plan(request, resolved)


def plan_resolved(request: PlanRequest, resolved: ResolvedSource) -> Plan:
    """The plan of a source that was resolved for this request."""
    with uncollected():
        return _plan(request, resolved)


def _plan(request: PlanRequest, resolved: ResolvedSource) -> Plan:
    options = request.options
    if request.only_moves:
        check_declares(resolved.checkpoint)
    recipe = override(
        resolved.recipe,
        engine=check_engine_name(options.engine),
        targets=tuple(options.targets or ()),
        ignore=tuple(options.ignore or ()),
        **native_settings(resolved.checkpoint, _with_statistics(request, resolved)),
    )
    plan = make_plan(
        recipe,
        resolved.family,
        resolved.checkpoint,
        allow_unmatched=options.allow_unmatched,
        allow_incomplete=options.allow_incomplete,
    )
    if request.only_moves:
        check_moves(plan)
    if options.stats is not None:
        plan = replace(plan, warnings=(*plan.warnings, *check_statistics(plan, options.stats)))
    if options.importance is not None:
        plan = with_importance(plan, open_importance(options.importance))
    return plan if request.limits is None else limited(plan, request.limits)


def _with_statistics(request: PlanRequest, resolved: ResolvedSource) -> dict[str, object]:
    """Settings, with the input scales of the statistics where there are any."""
    stats, settings = request.options.stats, request.options.settings
    if request.only_moves:
        settings["rules"] = []
    if stats is None:
        return settings
    checkpoint = resolved.checkpoint
    layers = {experts for name in checkpoint.tensors if (experts := experts_in(name)) is not None}
    family = resolved.family
    num_experts = family.num_experts(checkpoint.config) if family.is_known else _MANY
    found = read_input_scales(stats, layers, num_experts)
    scales = {name: list(pair) for name, pair in found.items()}
    return settings | {"input_scales": scales}


def describe(
    resolved: ResolvedSource,
    plan: Plan,
    loading: Sequence[EngineReport],
    workers: Workers,
    *,
    streaming: bool | None = None,
) -> PlanDescription:
    """``streaming``: the way that was asked for; all of them where that is open."""
    return PlanDescription(
        plan=plan,
        tp=_tensor_parallel(resolved, plan),
        loading=loading,
        workers=workers,
        calibration=calibration_needs(plan, streaming=streaming),
    )


def check_room(resolved: ResolvedSource, plan: Plan, target: Path, *, spool_bytes: int) -> None:
    """Raise ResourceError where the disk of ``target`` has no room for what is not made yet.

    As ``convert`` finds it out, but before anything is hashed: what a journal names counts as made.
    """
    from quantkit.checkpoint.output import WORK_NAME, partial_of
    from quantkit.convert.conversion import Conversion, check_resources
    from quantkit.convert.journal import read_journals

    if target.exists():  # made, or refused by ``convert``
        return
    calibration = calibration_needs(plan)
    if calibration:  # over how many tokens, is not known here
        check_disk(min(calibration, key=lambda way: way.disk_bytes(0)), target, num_tokens=0)
    partial = partial_of(target)
    done = read_journals(partial / WORK_NAME)
    names = {shard.name for shard in plan.shards} - done.outputs.keys()
    half_made = sum(path.stat().st_size for name in names if (path := partial / name).is_file())
    everything = frozenset(source.name for source in plan.checkpoint.shards)
    conversion = Conversion(
        plan=plan, target=target, num_jobs=1, repository=resolved.repository, spool_bytes=spool_bytes
    )
    check_resources(conversion, everything, done, reclaimed_bytes=half_made)


def engine_reports(plan: Plan) -> tuple[EngineReport, ...]:
    """What the engines make of the output: those of the recipe, else all."""
    with uncollected():
        return check_plan(plan, launches_of(plan.recipe))


def check_servable(plan: Plan, reports: Sequence[EngineReport], *, is_allowed: bool) -> None:
    """Raise VerificationError where an engine that is meant cannot load the output, and the user does not allow it."""
    if not is_allowed:
        refuse_unservable(plan, reports)


def _tensor_parallel(resolved: ResolvedSource, plan: Plan) -> tuple[TpVerdict, ...]:
    """Legal tensor-parallel sizes in the engines of the recipe; 'unknown' where those of the family are not known."""
    is_rest_fp8 = any(job.is_fp8 and job.role is not Role.ROUTED_EXPERT for job in plan.jobs)
    verdicts = legal_tp(
        family=resolved.family,
        config=resolved.checkpoint.config,
        group_size=plan.recipe.group_size,
        rest_block=BLOCK[0] if is_rest_fp8 else None,
        kind=kind_of(plan.config),
    )
    return tuple(one for one in verdicts if not plan.recipe.engines or one.engine in plan.recipe.engines)
