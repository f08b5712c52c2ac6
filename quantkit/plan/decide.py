"""What happens to every weight, in an order that matters: each step sees what those before have left.

Rules; the draft's experts; FP8 that stays, or that BF16 goes back to; what INT4 does not divide; INT4 that is there.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from quantkit.checkpoint.source import Checkpoint
from quantkit.codecs.float_values import HALF, FloatValues
from quantkit.codecs.fp8_block import Fp8Block
from quantkit.codecs.int4_group import Int4Group
from quantkit.engines.fusion import check_one_scheme, fused_group
from quantkit.errors import RecipeError
from quantkit.families.family import Family, Role
from quantkit.layouts import LAYOUTS, w4afp8
from quantkit.numerics.packing import CODES_PER_WORD
from quantkit.plan.kept_fp8 import fp8_warnings, kept_fp8_weights, loadable, recover_linears
from quantkit.plan.mtp import kept_experts
from quantkit.plan.output_config import scheme_of
from quantkit.plan.plan import Action, RuleCount
from quantkit.plan.relayout import check_all_experts, check_native, check_signs, lay_out_anew, relayout_warnings
from quantkit.recipe import Recipe, decide
from quantkit.weights.source_form import source_form
from quantkit.weights.weight import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """``kept_fp8``: weights that stay in the source's FP8 blocks, byte for byte."""

    actions: Mapping[str, Action]
    kept_fp8: frozenset[str]
    rules: tuple[RuleCount, ...]
    warnings: tuple[str, ...]


def decide_actions(
    recipe: Recipe,
    family: Family,
    checkpoint: Checkpoint,
    weights: Mapping[str, Weight],
    roles: Mapping[str, Role],
    drafts: range,
) -> Decisions:
    """``drafts``: the numbers of MTP layers. Raises RecipeError or SourceError with the tensor and the remedy."""
    form, scheme, layout = source_form(checkpoint.quantization), scheme_of(recipe), LAYOUTS[recipe.layout]
    check_native(weights, form, scheme, layout)
    warnings = check_signs(checkpoint, weights, recipe)
    actions, counts = _decide_all(recipe, weights, roles)
    kept_drafts = kept_experts(recipe, weights, roles, drafts)
    for name in kept_drafts:
        actions[name] = _action(weights[name], roles[name], "keep")
    kept_fp8 = kept_fp8_weights(recipe, weights, roles, actions)
    warnings += recover_linears(recipe, weights, roles, actions)
    if recipe.mtp == "fp8":
        kept_fp8 |= loadable(kept_drafts, weights)
    warnings += fp8_warnings(recipe, form, kept_fp8)
    warnings += _keep_undividable(actions, weights, roles, scheme, family)
    lay_out_anew(actions, weights, recipe)
    if recipe.layout == w4afp8.METHOD:
        check_all_experts(weights, roles, actions)
    warnings += relayout_warnings(weights, actions, layout)
    check_one_scheme(_schemes(weights, actions, kept_fp8))
    return Decisions(actions=actions, kept_fp8=kept_fp8, rules=_rule_counts(recipe, counts), warnings=tuple(warnings))


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
