"""Plans of directories, as the command line makes them."""

from pathlib import Path
from typing import Any

from quantkit.checkpoint.source import open_checkpoint
from quantkit.families import FAMILIES
from quantkit.plan.make import make_plan
from quantkit.plan.plan import Plan
from quantkit.recipe import override
from quantkit.sources import resolve_source
from quantkit.weights.binding import bind_weights
from quantkit.weights.identity import model_fingerprint
from quantkit.weights.source_form import source_form


def plan_of(source: Path, *, allow_incomplete: bool = False, **changes: Any) -> Plan:
    resolved = resolve_source(str(source))
    recipe = override(resolved.recipe, **changes)
    return make_plan(recipe, resolved.family, resolved.checkpoint, allow_incomplete=allow_incomplete)


def fingerprint(source: Path) -> str:
    """Of the norms of the model in a directory of the tiny family, as statistics name it."""
    checkpoint, family = open_checkpoint(source), FAMILIES["glm_moe_dsa"]
    binding = bind_weights(checkpoint.tensors, source_form(checkpoint.quantization), family.fused_experts)
    return model_fingerprint(binding, family, checkpoint.config).norms
