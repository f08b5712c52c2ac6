"""Which modules of a plan a method works on, and the source as transformers would load it. Without torch."""

from collections.abc import Iterable
from typing import Any

from quantkit.families import FAMILIES
from quantkit.module_names import layer_of
from quantkit.plan.make import make_plan
from quantkit.plan.mtp import is_in, mtp_layers
from quantkit.plan.plan import Action, Job, Plan
from quantkit.plan.smoothed import DOWN, UP
from quantkit.recipe import default_recipe, parse_recipe, recipe_document

Shapes = dict[str, tuple[int, int]]  # rows and columns of modules


def int4_shapes(plan: Plan) -> Shapes:
    """Of all that become INT4."""
    return _shapes(job for job in plan.jobs if job.action == Action.INT4)


def run_shapes(plan: Plan) -> Shapes:
    """Of those in layers that are run: transformers has no class for the draft's, and the search decides there."""
    drafts = mtp_layers(FAMILIES[plan.family], plan.checkpoint.config)
    return {name: shape for name, shape in int4_shapes(plan).items() if not is_in(drafts, name)}


def chosen_shapes(plan: Plan) -> Shapes:
    """Of those whose words the method chooses: all that are run, but of AWQ's only those that it changes."""
    is_awq = plan.recipe.method == "awq"
    return {name: shape for name, shape in run_shapes(plan).items() if not is_awq or name.endswith((UP, DOWN))}


def layer_number(name: str) -> int | None:
    """Of the layer that a module or tensor lies in; None for what lies in none."""
    layer = layer_of(name)
    return None if layer is None else layer.number


def decoded_plan(plan: Plan) -> Plan | None:
    """The source in BF16, without the draft's layers; None where transformers loads it as it is."""
    checkpoint, family = plan.checkpoint, FAMILIES[plan.family]
    if not checkpoint.quantization:
        return None
    wanted: dict[str, Any] = {"rules": [], "mtp": "drop" if family.num_mtp_layers(checkpoint.config) else "int4"}
    document = recipe_document(default_recipe(family.name, has_experts=True)) | wanted
    return make_plan(parse_recipe(document, where="decoded source"), family, checkpoint, allow_incomplete=True)


def _shapes(jobs: Iterable[Job]) -> Shapes:
    return {job.weight.module: (job.weight.num_rows, job.weight.num_cols) for job in jobs}
