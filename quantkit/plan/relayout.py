"""INT4 that the source holds already: it passes through, or is laid out anew, and is never requantized."""

from collections.abc import Mapping, MutableMapping
from typing import Any, NoReturn, cast, get_args

from quantkit.checkpoint.file_names import CONFIG_NAME, MANIFEST_NAME
from quantkit.checkpoint.source import Checkpoint
from quantkit.codecs.int4_group import Int4Group
from quantkit.codecs.opaque import NativeInt4
from quantkit.errors import RecipeError, VerificationError
from quantkit.families.family import Role
from quantkit.integrity.manifest import read_manifest
from quantkit.layouts import Layout, w4afp8
from quantkit.plan.plan import CARRIED, Action, Job, Output, Plan
from quantkit.recipe import GroupSize, Recipe
from quantkit.recipe_settings import W4A8_REMEDY, forms_of
from quantkit.tensors import BF16, F16
from quantkit.weights.source_form import SourceForm, source_form
from quantkit.weights.weight import Weight


def native_settings(checkpoint: Checkpoint, settings: Mapping[str, object]) -> dict[str, Any]:
    """Settings of a recipe, with those that INT4 of the source leaves no choice of where nothing else is asked for.

    Raises RecipeError for groups that no engine reads.
    """
    form = source_form(checkpoint.quantization)
    asked = {key: value for key, value in settings.items() if value is not None}
    if form.int4_group_size is None:
        return asked
    if form.int4_group_size not in get_args(GroupSize):
        raise RecipeError(
            f"the source is INT4 in groups of {form.int4_group_size}, and engines read 32, 64 and 128",
            file=CONFIG_NAME,
            remedy="convert the FP8 or BF16 source instead",
        )
    for wanted in forms_of(asked):
        size = wanted.needs.get("group_size", form.int4_group_size)
        if size != form.int4_group_size:
            raise RecipeError(
                f"the source is INT4 in groups of {form.int4_group_size}, and kernels for FP8 activations read {size}",
                file=CONFIG_NAME,
                remedy=W4A8_REMEDY,
            )
    found: dict[str, object] = {"group_size": form.int4_group_size}
    if not form.is_symmetric and asked.get("layout") != w4afp8.METHOD:
        found["zero_points"] = True
    return found | asked


def check_native(weights: Mapping[str, Weight], form: SourceForm, scheme: Int4Group, layout: Layout) -> None:
    """Raise RecipeError where the output could not hold native INT4 as it is."""
    native = _first_native(weights)
    if native is None:
        return
    if form.int4_group_size != scheme.group_size:
        _refuse(
            native,
            f"is INT4 already, in groups of {form.int4_group_size}: it passes through and is never requantized",
            f"leave --group-size out, or give {form.int4_group_size}" if layout.name != w4afp8.METHOD else W4A8_REMEDY,
        )
    if not form.is_symmetric and (layout.name == w4afp8.METHOD or not scheme.zero_points):
        _refuse(
            native,
            f"has zero points, which {'w4afp8' if layout.name == w4afp8.METHOD else 'symmetric INT4'} has no place for",
            "leave --symmetric and --format out, or convert the FP8 source again",
        )
    if form.is_symmetric and scheme.zero_points:
        _refuse(native, "is symmetric INT4 already, and is never requantized", "leave --zero-points out")


def check_signs(checkpoint: Checkpoint, weights: Mapping[str, Weight], recipe: Recipe) -> list[str]:
    """Raise RecipeError where a source of our own says that its scales may be negative, and they must not be.

    Of another tool's source a warning: they are looked at when they are read.
    """
    native = _first_native(weights)
    if native is None or not needs_positive_scales(recipe):
        return []
    made_with = _recorded_recipe(checkpoint)
    if made_with.get("signed_scales") is True and made_with.get("scales") == "search":
        _refuse(
            native,
            "was made with scales of either sign, and kernels for FP8 activations are not known to read negative ones",
            W4A8_REMEDY,
        )
    known = made_with.get("signed_scales") is False
    return [] if known else ["signs of scales are looked at as they are read: one below zero ends the work"]


def _first_native(weights: Mapping[str, Weight]) -> Weight | None:
    return next((weight for weight in weights.values() if weight.is_native_int4), None)


def _recorded_recipe(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Of the manifest beside a source whose INT4 we have made; nothing where there is none that can be read."""
    if not (checkpoint.directory / MANIFEST_NAME).is_file():
        return {}
    try:
        manifest = read_manifest(checkpoint.directory)
        was_made = any(part["action"] == Action.INT4 for part in manifest.document["parts"])
        return {**manifest.recipe} if was_made else {}
    except (VerificationError, LookupError, TypeError):
        return {}


def check_all_experts(weights: Mapping[str, Weight], roles: Mapping[str, Role], actions: Mapping[str, Action]) -> None:
    """Raise RecipeError for a routed expert that would not be INT4 in w4afp8: the engine has no other form for one."""
    for name, weight in weights.items():
        is_int4 = weight.is_native_int4 or actions[name] == Action.INT4
        if roles[name] is Role.ROUTED_EXPERT and weight.is_matrix and not is_int4:
            _refuse(
                weight,
                "is a routed expert that stays as it is, and w4afp8 makes every one of them INT4, the draft's too",
                "give --mtp drop where it is the draft's, or convert the FP8 source with --format w4afp8",
            )


def _refuse(native: Weight, message: str, remedy: str) -> NoReturn:
    raise RecipeError(message, tensor=native.stored.name, file=native.stored.path.name, remedy=remedy)


def needs_positive_scales(recipe: Recipe) -> bool:
    """Whether kernels for FP8 activations will read them."""
    return any(form.reads_positive_scales for form in forms_of(recipe.model_dump()))


def lay_out_anew(actions: MutableMapping[str, Action], weights: Mapping[str, Weight], recipe: Recipe) -> None:
    """Native INT4 of another layout, and of any where every scale is to be looked at; the rest passes through."""
    must_look = needs_positive_scales(recipe)
    for name, weight in weights.items():
        if weight.is_native_int4:
            is_same = cast(NativeInt4, weight.codec).layout == recipe.layout
            actions[name] = Action.COPY if is_same and not must_look else Action.RELAYOUT


def relayout_job(weight: Weight, role: Role, scheme: Int4Group, layout: Layout) -> Job:
    """Scales keep their dtype: nothing is rounded here. ``scheme.signed``: whether they may be negative."""
    parts = layout.stored(scheme, weight.num_rows, weight.num_cols, weight.parts["scale"].spec.dtype)
    outputs = {
        part: Output(f"{weight.module}.{stored.leaf}", stored.spec, stored.rows_each) for part, stored in parts.items()
    }
    if layout.name == cast(NativeInt4, weight.codec).layout:
        outputs |= {
            part: Output(stored.name, stored.spec, rows_each=0)
            for part, stored in weight.parts.items()
            if part in CARRIED
        }
    return Job(weight=weight, role=role, action=Action.RELAYOUT, outputs=outputs, scheme=scheme)


def relayout_warnings(weights: Mapping[str, Weight], actions: Mapping[str, Action], layout: Layout) -> list[str]:
    """What an engine will do otherwise than with the source."""
    relaid = [weight for name, weight in weights.items() if actions[name] == Action.RELAYOUT]
    warnings = []
    moved = (weight for weight in relaid if cast(NativeInt4, weight.codec).layout != layout.name)
    inputs = sum("input_scale" in weight.parts for weight in moved)
    if inputs:
        warnings.append(f"{inputs} static activation scales of the source are left out")
    dtypes = {weight.parts["scale"].spec.dtype for weight in relaid}
    if dtypes - {BF16}:
        name = "FP16" if F16 in dtypes else "FP32"
        warnings.append(f"scales stay in {name}, as in the source; engines round them to BF16 as they load them")
    return warnings


def check_declares(checkpoint: Checkpoint) -> None:
    """As ``check_moves``, of what a config says, before a plan is refused for another reason."""
    _refuse_nothing(source_form(checkpoint.quantization).int4_group_size is None)


def check_moves(plan: Plan) -> None:
    """Raise RecipeError for a source that holds no INT4: there is nothing to lay out."""
    _refuse_nothing(not any(job.weight.is_native_int4 for job in plan.jobs))


def _refuse_nothing(has_none: bool) -> None:
    if has_none:
        raise RecipeError(
            "the source holds no INT4: relayout moves codes that are there",
            file=CONFIG_NAME,
            remedy="quantkit convert makes INT4, in either --format",
        )
