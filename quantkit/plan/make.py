"""Recipe x Family x Checkpoint -> Plan. Reads no tensor data; everything that can be refused is refused here."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.writer import order_tensors
from quantkit.codecs.int4_group import Int4Group
from quantkit.errors import RecipeError, SourceError
from quantkit.families.family import Family, Role
from quantkit.layouts import LAYOUTS, w4afp8
from quantkit.plan.decide import decide_actions
from quantkit.plan.input_scales import input_scale_of
from quantkit.plan.kept_fp8 import (
    fp8_job,
    recovered_job,
)
from quantkit.plan.mtp import is_in, mtp_layers, without_mtp
from quantkit.plan.output_config import output_config, scheme_of
from quantkit.plan.plan import Action, Job, Output, Plan, PlannedShard, RuleCount
from quantkit.plan.relayout import (
    needs_positive_scales,
    relayout_job,
)
from quantkit.plan.smoothed import mark_smoothed
from quantkit.recipe import Recipe
from quantkit.tensors import BF16, TensorSpec
from quantkit.weights.binding import Binding, bind_checkpoint
from quantkit.weights.completeness import check_complete
from quantkit.weights.weight import Weight


def make_plan(
    recipe: Recipe,
    family: Family,
    checkpoint: Checkpoint,
    *,
    allow_unmatched: bool = False,
    allow_incomplete: bool = False,
) -> Plan:
    """The complete plan, or a RecipeError or SourceError with the tensor and the remedy."""
    binding = bind_checkpoint(checkpoint, family)
    drafts = mtp_layers(family, checkpoint.config)
    roles = {name: family.role_of(name) for name in binding.weights}
    warnings, is_incomplete = check_complete(family, checkpoint, binding, allow_incomplete=allow_incomplete)
    if recipe.mtp == "drop":
        binding = replace(binding, weights=without_mtp(binding.weights, drafts))
        warnings.append("the MTP layer is left out: no speculative decoding with it")
    _check_no_unknown_experts(binding.weights, roles)
    warnings += _warn_about(binding, roles)
    made = decide_actions(recipe, family, checkpoint, binding.weights, roles, drafts)
    warnings += made.warnings
    if not allow_unmatched:
        _check_matched(made.rules, recipe)
    scheme = scheme_of(recipe)
    moved = replace(scheme, signed=not needs_positive_scales(recipe))
    jobs = [
        fp8_job(weight, roles[name], recipe)
        if name in made.kept_fp8
        else _job(weight, roles[name], made.actions[name], recipe, moved if weight.is_native_int4 else scheme)
        for name, weight in binding.weights.items()
    ]
    _check_calibrated(jobs, recipe, drafts)
    mark_smoothed(jobs, recipe, drafts)
    if not jobs:
        raise SourceError("holds no tensors", file=checkpoint.directory, remedy="name a checkpoint directory")
    if not any(job.action == Action.INT4 for job in jobs):
        warnings += _without_int4(jobs, recipe)
    layout = LAYOUTS[recipe.layout]
    return Plan(
        recipe=recipe,
        family=family.name,
        layout=layout,
        checkpoint=checkpoint,
        shards=_shards(jobs, checkpoint),
        config=output_config(checkpoint, family, jobs, recipe, layout),
        rules=made.rules,
        dropped=binding.dropped,
        warnings=tuple(warnings),
        is_incomplete=is_incomplete,
    )


def _check_calibrated(jobs: Iterable[Job], recipe: Recipe, drafts: range) -> None:
    """Raise RecipeError where a method that runs the model has nothing to decide: hours for what a copy does."""
    if recipe.method == "search" or any(
        job.action == Action.INT4 and not is_in(drafts, job.weight.module) for job in jobs
    ):
        return
    is_native = any(job.weight.is_native_int4 for job in jobs)
    what = "the source is INT4 already" if is_native else "no weight of the layers that are run becomes INT4"
    told = "codes pass through bit for bit, and quantkit relayout moves them into another layout"
    raise RecipeError(
        f"{what}: --method {recipe.method} has nothing to quantize",
        remedy=f"leave --method out: {told}" if is_native else "leave --method out, or choose other --targets",
    )


def _without_int4(jobs: Iterable[Job], recipe: Recipe) -> list[str]:
    """Why nothing is quantized; no news where nothing was to be."""
    actions = {job.action for job in jobs if job.weight.is_native_int4}
    if not actions:
        return ["nothing is quantized: no weight was matched by an int4 rule"]
    if not recipe.rules:
        return []
    done = "are laid out anew" if Action.RELAYOUT in actions else "pass through"
    return [f"the source is INT4 already: its codes and scales {done} bit for bit"]


def _check_no_unknown_experts(weights: Mapping[str, Weight], roles: Mapping[str, Role]) -> None:
    """Experts in one tensor of an unknown form would stay at 16 bits, and nobody would notice."""
    for name, weight in weights.items():
        if roles[name] == Role.ROUTED_EXPERT and len(weight.shape) > 2:
            weight.fail(
                f"holds experts in a form that is not known {list(weight.shape)}",
                remedy="store experts one by one, or as gate_up_proj and down_proj [expert, out, in]",
            )


def _check_matched(rules: Iterable[RuleCount], recipe: Recipe) -> None:
    for count in rules:
        if count.num_weights == 0:
            raise RecipeError(
                f"{str(count.rule)!r} ({count.action}) matches no weight",
                remedy=f"correct it on the command line or in recipe {recipe.name}, or pass --allow-unmatched",
            )


def _warn_about(binding: Binding, roles: Mapping[str, Role]) -> list[str]:
    warnings = []
    unknown = [name for name, role in roles.items() if role == Role.UNKNOWN]
    if unknown:
        warnings.append(
            f"{len(unknown)} tensors of no known role pass through ({', '.join(unknown[:3])}"
            f"{', ...' if len(unknown) > 3 else ''})"
        )
    if binding.dropped:
        warnings.append(
            f"{len(binding.dropped)} static activation or KV scales of the source are left out "
            f"({next(iter(binding.dropped))}): the output declares no such scheme"
        )
    return warnings


def _job(weight: Weight, role: Role, action: Action, recipe: Recipe, scheme: Int4Group) -> Job:
    layout = LAYOUTS[recipe.layout]
    if action == Action.TO_FP8:
        return recovered_job(weight, role)
    if action == Action.RELAYOUT:
        return _with_input_scale(relayout_job(weight, role, scheme, layout), recipe)
    if action == Action.INT4:
        module, parts = weight.module, layout.stored(scheme, weight.num_rows, weight.num_cols)
        outputs = {
            part: Output(f"{module}.{stored.leaf}", stored.spec, stored.rows_each) for part, stored in parts.items()
        }
        return _with_input_scale(Job(weight, role, action, outputs, scheme), recipe)
    if action == Action.TO_BF16:
        outputs = {"values": Output(name=weight.name, spec=TensorSpec(BF16, weight.shape))}
    else:
        outputs = {part: Output(name=stored.name, spec=stored.spec) for part, stored in weight.parts.items()}
    return Job(weight, role, action, outputs)


def _with_input_scale(job: Job, recipe: Recipe) -> Job:
    bits = input_scale_of(job.weight, recipe.input_scales) if job.role is Role.ROUTED_EXPERT else None
    if bits is None:
        return job
    output = Output(f"{job.weight.module}.{w4afp8.INPUT_SCALE}", TensorSpec(BF16, ()), rows_each=0)
    return job._replace(outputs={**job.outputs, "input_scale": output}, input_scale=bits)


def _shards(jobs: Sequence[Job], checkpoint: Checkpoint) -> tuple[PlannedShard, ...]:
    """One output shard per source shard, of the same name; a source shard that held only scales has none."""
    by_path: dict[Path, list[Job]] = {shard.path: [] for shard in checkpoint.shards}
    for job in jobs:
        by_path[job.weight.stored.path].append(job)
    shards = []
    for path, shard_jobs in by_path.items():
        if shard_jobs:
            specs = {output.name: output.spec for job in shard_jobs for output in job.outputs.values()}
            shards.append(PlannedShard(name=path.name, jobs=tuple(shard_jobs), specs=order_tensors(specs)))
    return tuple(shards)
