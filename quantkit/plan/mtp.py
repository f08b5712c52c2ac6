"""The draft (MTP) layers apart from the decoder's: what becomes of their experts, or of the whole of them.

A draft cannot change what a model answers, only how many of its guesses are taken: INT4 is the default. ``eh_proj``,
norms and heads stay as they are in every form.
"""

from collections.abc import Mapping
from typing import Any

from quantkit.codecs.fp8_block import Fp8Block
from quantkit.errors import RecipeError
from quantkit.families.config_values import Config
from quantkit.families.family import Family, Role
from quantkit.module_names import layer_of
from quantkit.recipe import Recipe
from quantkit.weights.weight import Weight

_COUNT = "num_nextn_predict_layers"


def mtp_layers(family: Family, config: Config) -> range:
    """Their numbers; none for a family whose configs do not say."""
    if not family.is_known:
        return range(0)
    first = family.num_layers(config)
    return range(first, first + family.num_mtp_layers(config))


def is_in(layers: range, module: str) -> bool:
    """Whether a module lies in one of these layers, whatever its root: vision parts here have no ``layers``."""
    layer = layer_of(module)
    return layer is not None and layer.number in layers


def without_mtp(weights: Mapping[str, Weight], layers: range) -> dict[str, Weight]:
    """What is left when the draft is dropped. Raises RecipeError where there is none."""
    left = {name: weight for name, weight in weights.items() if not is_in(layers, weight.module)}
    if len(left) == len(weights):
        raise _no_draft("drop")
    return left


def kept_experts(
    recipe: Recipe, weights: Mapping[str, Weight], roles: Mapping[str, Role], layers: range
) -> frozenset[str]:
    """Routed experts of the draft that the recipe does not make INT4.

    Raises RecipeError where the source has none, or not in the form that is asked for.
    """
    if recipe.mtp in ("int4", "drop"):
        return frozenset()
    found = {
        name: weight
        for name, weight in weights.items()
        if roles[name] == Role.ROUTED_EXPERT and is_in(layers, weight.module)
    }
    if not found:
        raise _no_draft(recipe.mtp)
    for name, weight in found.items():
        is_fp8 = isinstance(weight.codec, Fp8Block)
        if weight.is_native_int4 or (recipe.mtp == "fp8" and not is_fp8):
            stored = "INT4" if weight.is_native_int4 else "not FP8"
            raise RecipeError(
                f"is {stored} in the source, so not --mtp {recipe.mtp}", tensor=name, remedy="leave it out"
            )
    return frozenset(found)


def _no_draft(mtp: str) -> RecipeError:
    return RecipeError(f"--mtp {mtp}: the source has no MTP layer", remedy="leave --mtp out")


def expert_patterns(layers: range) -> tuple[str, ...]:
    """Entries for the experts of draft layers: in the files and in vLLM by number, in SGLang as ``model.decoder``."""
    return tuple(rf"re:.*\.?(layers\.{layer}|decoder)\.mlp\.experts\..*" for layer in layers)


def forget_mtp(config: dict[str, Any]) -> None:
    """A config without draft layers, wherever it counts them."""
    for section in (config, config.get("text_config")):
        if isinstance(section, dict) and _COUNT in section:
            section[_COUNT] = 0
