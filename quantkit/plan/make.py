"""Recipe x Family x Checkpoint -> Plan. Reads no tensor data; everything that can be refused is refused here."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.writer import order_tensors
from quantkit.codecs.float_values import HALF, FloatValues
from quantkit.codecs.fp8_block import Fp8Block
from quantkit.codecs.int4_group import Int4Group
from quantkit.engines.fusion import check_one_scheme, fused_group
from quantkit.errors import RecipeError, SourceError
from quantkit.families.family import Family, Role
from quantkit.layouts import LAYOUTS, w4afp8
from quantkit.numerics.packing import CODES_PER_WORD
from quantkit.plan.input_scales import input_scale_of
from quantkit.plan.kept_fp8 import (
    fp8_job,
    fp8_warnings,
    kept_fp8_weights,
    loadable,
    recover_linears,
    recovered_job,
)
from quantkit.plan.mtp import kept_experts, mtp_layers, without_mtp
from quantkit.plan.output_config import output_config, scheme_of
from quantkit.plan.plan import Action, Job, Output, Plan, PlannedShard, RuleCount
from quantkit.plan.relayout import (
    check_all_experts,
    check_native,
    check_signs,
    lay_out_anew,
    needs_positive_scales,
    relayout_job,
    relayout_warnings,
)
from quantkit.recipe import Recipe, decide
from quantkit.tensors import BF16, TensorSpec
from quantkit.weights.binding import Binding, bind_weights
from quantkit.weights.completeness import check_complete
from quantkit.weights.source_form import source_form
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
    form = source_form(checkpoint.quantization)
    binding = bind_weights(checkpoint.tensors, form, family.fused_experts)
    drafts = mtp_layers(family, checkpoint.config)
    roles = {name: family.role_of(name) for name in binding.weights}
    warnings, is_incomplete = check_complete(family, checkpoint, binding, allow_incomplete=allow_incomplete)
    kept_drafts = kept_experts(recipe, binding.weights, roles, drafts)
    if recipe.mtp == "drop":
        binding = replace(binding, weights=without_mtp(binding.weights, drafts))
        warnings.append("the MTP layer is left out: no speculative decoding with it")
    _check_no_unknown_experts(binding.weights, roles)
    warnings += _warn_about(binding, roles)
    layout = LAYOUTS[recipe.layout]
    scheme = scheme_of(recipe)
    moved = replace(scheme, signed=not needs_positive_scales(recipe))
    actions, counts = _decide_all(recipe, binding.weights, roles)
    for name in kept_drafts & actions.keys():
        actions[name] = _action(binding.weights[name], roles[name], "keep")
    kept_fp8 = kept_fp8_weights(recipe, binding.weights, roles, actions)
    warnings += recover_linears(recipe, binding.weights, roles, actions)
    if recipe.mtp == "fp8":
        kept_fp8 |= loadable(kept_drafts, binding.weights)
    warnings += fp8_warnings(recipe, form, kept_fp8)
    warnings += _keep_undividable(actions, binding.weights, roles, scheme, family)
    check_native(binding.weights, form, scheme, layout)
    warnings += check_signs(checkpoint, binding.weights, recipe)
    lay_out_anew(actions, binding.weights, recipe)
    if recipe.layout == w4afp8.METHOD:
        check_all_experts(binding.weights, roles, actions)
    warnings += relayout_warnings(binding.weights, actions, layout)
    check_one_scheme(_schemes(binding.weights, actions, kept_fp8))
    rules = _rule_counts(recipe, counts)
    if not allow_unmatched:
        _check_matched(rules, recipe)
    jobs = [
        fp8_job(weight, roles[name], recipe)
        if name in kept_fp8
        else _job(weight, roles[name], actions[name], recipe, moved if actions[name] == Action.RELAYOUT else scheme)
        for name, weight in binding.weights.items()
    ]
    if not jobs:
        raise SourceError("holds no tensors", file=checkpoint.directory, remedy="name a checkpoint directory")
    if not any(job.action == Action.INT4 for job in jobs):
        native = any(job.weight.is_native_int4 for job in jobs)
        relaid = any(job.action == Action.RELAYOUT for job in jobs)
        warnings.append(
            f"the source is INT4 already: its codes and scales {'are laid out anew' if relaid else 'pass through'} bit "
            "for bit"
            if native
            else "nothing is quantized: no weight was matched by an int4 rule"
        )
    return Plan(
        recipe=recipe,
        family=family.name,
        layout=layout,
        checkpoint=checkpoint,
        shards=_shards(jobs, checkpoint),
        config=output_config(checkpoint, family, jobs, recipe, layout),
        rules=rules,
        dropped=binding.dropped,
        warnings=tuple(warnings),
        is_incomplete=is_incomplete,
    )


def _decide_all(
    recipe: Recipe, weights: Mapping[str, Weight], roles: Mapping[str, Role]
) -> tuple[dict[str, Action], Counter[int]]:
    actions: dict[str, Action] = {}
    counts: Counter[int] = Counter()
    for name, weight in weights.items():
        wanted = "keep"
        if weight.is_matrix:
            wanted, rule = decide(recipe.rules, weight.module, roles[name])
            if rule is not None:
                counts[rule] += 1
        actions[name] = _action(weight, roles[name], wanted)
    return actions, counts


def _action(weight: Weight, role: Role, wanted: str) -> Action:
    if wanted == "int4" and not weight.is_native_int4:
        if isinstance(weight.codec, Fp8Block | FloatValues):
            return Action.INT4
        weight.fail(
            f"is {weight.stored.spec}, which cannot be made INT4",
            remedy="store it as BF16, F16, F32 or FP8 with its scale, or leave it out with --ignore",
        )
    if isinstance(weight.codec, Fp8Block):
        return Action.TO_BF16
    # FP16 becomes BF16, except where that would lose what decides between experts
    return Action.TO_BF16 if weight.codec == HALF and role != Role.ROUTER_BIAS else Action.COPY


def _keep_undividable(
    actions: dict[str, Action],
    weights: Mapping[str, Weight],
    roles: Mapping[str, Role],
    scheme: Int4Group,
    family: Family,
) -> list[str]:
    """A dimension that INT4 does not divide: an error for known experts, BF16 with a warning elsewhere."""
    kept = []
    for name, weight in weights.items():
        misfit = _misfit(weight, scheme) if actions[name] == Action.INT4 else ""
        if not misfit:
            continue
        if roles[name] == Role.ROUTED_EXPERT and family.is_known:
            raise RecipeError(
                misfit,
                tensor=name,
                file=weight.stored.path.name,
                remedy=f"choose a --group-size that divides {weight.num_cols}"
                if weight.num_cols % scheme.group_size
                else "leave --zero-points out",
            )
        kept.append(name)
    if not kept:
        return []
    groups = {fused_group(weights[name].module) for name in kept} - {None}
    for name, weight in weights.items():
        if actions[name] == Action.INT4 and fused_group(weight.module) in groups and name not in kept:
            kept.append(name)  # engines load it as one module with one that must stay
    for name in kept:
        actions[name] = _action(weights[name], roles[name], "keep")
    more = ", ..." if len(kept) > 3 else ""
    return [
        f"{len(kept)} weights are not quantized: groups of {scheme.group_size} do not divide their columns"
        f"{', or words their rows' if scheme.zero_points else ''}, or those "
        f"of a sister ({', '.join(kept[:3])}{more})"
    ]


def _misfit(weight: Weight, scheme: Int4Group) -> str:
    """Why a weight cannot be INT4 in whole groups and words; empty where it can."""
    if weight.num_cols % scheme.group_size:
        return f"has {weight.num_cols} columns, which groups of {scheme.group_size} do not divide"
    if scheme.zero_points and weight.num_rows % CODES_PER_WORD:
        return f"has {weight.num_rows} rows, and zero points are packed by {CODES_PER_WORD}"
    return ""


def _check_no_unknown_experts(weights: Mapping[str, Weight], roles: Mapping[str, Role]) -> None:
    """Experts in one tensor of an unknown form would stay at 16 bits, and nobody would notice."""
    for name, weight in weights.items():
        if roles[name] == Role.ROUTED_EXPERT and len(weight.shape) > 2:
            weight.fail(
                f"holds experts in a form that is not known {list(weight.shape)}",
                remedy="store experts one by one, or as gate_up_proj and down_proj [expert, out, in]",
            )


def _schemes(weights: Mapping[str, Weight], actions: Mapping[str, Action], kept_fp8: Collection[str]) -> dict[str, str]:
    """Module to how it lies in the output."""

    def scheme_of(name: str, weight: Weight) -> str:
        if actions[name] == Action.INT4 or weight.is_native_int4:
            return "INT4"
        return "FP8" if name in kept_fp8 else "not INT4"

    return {weight.module: scheme_of(name, weight) for name, weight in weights.items() if len(weight.shape) == 2}


def _rule_counts(recipe: Recipe, counts: Counter[int]) -> tuple[RuleCount, ...]:
    return tuple(
        RuleCount(rule=rule.role or rule.pattern or "", action=rule.action, num_weights=counts[index])
        for index, rule in enumerate(recipe.rules)
    )


def _check_matched(rules: Iterable[RuleCount], recipe: Recipe) -> None:
    for count in rules:
        if count.num_weights == 0:
            raise RecipeError(
                f"{count.rule!r} ({count.action}) matches no weight",
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
