"""Weights that stay in the source's FP8 blocks, byte for byte, beside experts in INT4."""

from collections.abc import Collection, Mapping, MutableMapping

from quantkit.codecs.fp8_block import Fp8Block
from quantkit.engines.fusion import fused_group
from quantkit.engines.mixed import BLOCK, NATIVE_FP8_ROLES, keeps_fp8
from quantkit.engines.parallel import ENGINES
from quantkit.errors import RecipeError
from quantkit.families.family import Role
from quantkit.plan.plan import Action, Job, Output
from quantkit.recipe import Recipe
from quantkit.tensors import BF16, F8_E4M3, F32, TensorSpec
from quantkit.weights.source_form import SourceForm
from quantkit.weights.weight import Weight


def kept_fp8_weights(
    recipe: Recipe, weights: Mapping[str, Weight], roles: Mapping[str, Role], actions: Mapping[str, Action]
) -> frozenset[str]:
    """Weights that stay in the source's FP8 blocks, byte for byte; of modules that engines fuse all or none."""
    if recipe.rest == "bf16":
        return frozenset()
    kept = {
        name
        for name, weight in weights.items()
        if actions[name] == Action.TO_BF16 and _is_loadable_fp8(weight) and _is_kept(recipe, weight, roles[name])
    }
    if has_native_fp8(recipe):
        return frozenset(kept)
    members: dict[object, set[str]] = {}
    for name, weight in weights.items():
        key = fused_group(weight.module)
        if key is not None and weight.is_matrix and roles[name] != Role.ROUTED_EXPERT:
            members.setdefault(key, set()).add(name)
    halves = set[str]().union(*(names for names in members.values() if not names <= kept))
    return frozenset(kept - halves)


def recover_linears(
    recipe: Recipe, weights: Mapping[str, Weight], roles: Mapping[str, Role], actions: MutableMapping[str, Action]
) -> list[str]:
    """Where the engine makes every Linear FP8: BF16 beside INT4 that is there already goes back into the blocks that it
    was decoded from. Warnings; raises RecipeError for what is not FP8, and what never was as far as can be known."""
    if not has_native_fp8(recipe):
        return []
    has_int4 = any(weight.is_native_int4 for weight in weights.values())
    recovered = 0
    for name, weight in weights.items():
        is_linear = weight.is_matrix and roles[name] in (*NATIVE_FP8_ROLES, Role.LINEAR)
        if not is_linear or actions[name] != Action.COPY or weight.is_native_int4 or _is_loadable_fp8(weight):
            continue
        if not has_int4 or weight.stored.spec.dtype != BF16:
            option = "--format w4afp8" if recipe.layout == "w4afp8" else f"--rest {recipe.rest}"
            raise RecipeError(
                f"is not FP8 in blocks of 128 x 128, and with {option} SGLang makes every Linear that",
                tensor=name,
                file=weight.stored.path.name,
                remedy=f"leave {option} out, or convert a source whose Linears all are FP8",
            )
        actions[name] = Action.TO_FP8
        recovered += 1
    if not recovered:
        return []
    return [f"{recovered} BF16 Linears go back into the FP8 blocks that they were decoded from, exactly or not at all"]


def has_native_fp8(recipe: Recipe) -> bool:
    """Whether what stays FP8 keeps its own names, and every Linear is of that kind."""
    return recipe.layout == "w4afp8" or recipe.rest == "fp8-native"


def _is_kept(recipe: Recipe, weight: Weight, role: Role) -> bool:
    if recipe.layout == "w4afp8":
        return role is not Role.ROUTED_EXPERT
    if recipe.rest == "fp8-native":
        return role in NATIVE_FP8_ROLES
    return keeps_fp8(weight.module, role, tuple(recipe.engines) or ENGINES)


def loadable(names: Collection[str], weights: Mapping[str, Weight]) -> frozenset[str]:
    """The same names. Raises RecipeError for FP8 that no engine loads from a file."""
    for name in names:
        if not _is_loadable_fp8(weights[name]):
            raise RecipeError(
                "is not in FP8 blocks of 128 x 128 with a scale of its own",
                tensor=name,
                remedy="give --mtp bf16 or int4",
            )
    return frozenset(names)


def _is_loadable_fp8(weight: Weight) -> bool:
    """Blocks and scales as engines read them from a file."""
    if not isinstance(weight.codec, Fp8Block) or weight.codec.block != BLOCK or weight.codec.row_offset:
        return False
    scale = weight.parts["scale"].spec
    return scale.dtype in (F32, BF16) and scale.shape == weight.codec.grid_shape(weight.num_rows, weight.num_cols)


def fp8_warnings(recipe: Recipe, form: SourceForm, kept_fp8: Collection[str]) -> list[str]:
    if recipe.rest == "bf16" or kept_fp8 or has_native_fp8(recipe):
        return []
    why = "the source has no FP8 weights" if not form.fp8_blocks else "none lies in blocks of 128 x 128 that they load"
    return [f"--rest {recipe.rest} keeps nothing: {why}"]


def recovered_job(weight: Weight, role: Role) -> Job:
    """Codes and scales under native names."""
    rows, cols = weight.shape
    outputs = {
        "codes": Output(weight.name, TensorSpec(F8_E4M3, weight.shape)),
        "scale": Output(
            f"{weight.module}.weight_scale_inv",
            TensorSpec(F32, (-(-rows // BLOCK[0]), -(-cols // BLOCK[1]))),
            rows_each=BLOCK[0],
        ),
    }
    return Job(weight=weight, role=role, action=Action.TO_FP8, outputs=outputs)


def fp8_job(weight: Weight, role: Role, recipe: Recipe) -> Job:
    """Codes and scales as they are, under the names of compressed-tensors or DeepSeek's."""
    leaves = {"codes": "weight", "scale": "weight_scale_inv" if has_native_fp8(recipe) else "weight_scale"}
    outputs = {
        part: Output(name=f"{weight.module}.{leaf}", spec=weight.parts[part].spec) for part, leaf in leaves.items()
    }
    return Job(weight=weight, role=role, action=Action.COPY, outputs=outputs)
