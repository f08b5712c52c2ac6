"""Settings of a recipe that follow from one another, and those that do not go together."""

from collections.abc import Mapping
from typing import Any

from quantkit.errors import RecipeError

_W4A8 = {"group_size": 128, "signed_scales": False}
_IMPLIED: tuple[tuple[str, object, str, Mapping[str, object]], ...] = (
    ("layout", "w4afp8", "--format w4afp8", _W4A8 | {"rest": "fp8"}),
    ("activations", "fp8-dynamic", "--activations fp8-dynamic", _W4A8),
    ("zero_points", True, "--zero-points", {"signed_scales": False}),
)
_OPTIONS = {"signed_scales": "--positive-scales", "group_size": "--group-size", "rest": "--rest", "mtp": "--mtp"}


def implied(document: Mapping[str, Any], given: Mapping[str, object]) -> dict[str, object]:
    """What the settings ``given`` on the command line make of others that are not, over a recipe's document."""
    merged = {**document, **given}
    found: dict[str, object] = {}
    for key, value, _, settings in _IMPLIED:
        if given.get(key) == value:
            found |= {name: one for name, one in settings.items() if name not in given and merged.get(name) != one}
    return found


_OF_ONE_ENGINE = (("layout", "w4afp8", "sglang"), ("rest", "fp8-native", "sglang"), ("zero_points", True, "vllm"))


def implied_engine(given: Mapping[str, object]) -> str | None:
    """The engine that alone loads what the settings ask for; None where both may."""
    return next((engine for key, value, engine in _OF_ONE_ENGINE if given.get(key) == value), None)


def check_together(document: Mapping[str, Any]) -> None:
    """Raise RecipeError for settings of a whole recipe that no output could have."""
    for key, value, option, settings in _IMPLIED:
        if document.get(key) != value:
            continue
        for name, needed in settings.items():
            if document.get(name) != needed:
                given = _OPTIONS[name] if needed is False else f"{_OPTIONS[name]} {needed}"
                raise RecipeError(
                    f"{option} does not go with {name} {_word(document.get(name))}",
                    remedy=f"give {given}",
                )
    if document.get("layout") == "w4afp8":
        _check_w4afp8(document)
    elif document.get("input_scales"):
        raise RecipeError("input scales are of w4afp8 alone", remedy="give --format w4afp8, or leave --stats out")
    if document.get("zero_points") and document.get("activations", "none") != "none":
        raise RecipeError(
            "--zero-points does not go with --activations: kernels for FP8 activations read symmetric INT4",
            remedy="leave one of them out",
        )
    if document.get("rest") == "fp8-native" and document.get("mtp") == "fp8":
        raise RecipeError(
            "--rest fp8-native does not go with --mtp fp8: it speaks of Linears, and experts are INT4",
            remedy="give --mtp int4, bf16 or drop",
        )


def _check_w4afp8(document: Mapping[str, Any]) -> None:
    for key, allowed in (("mtp", ("int4", "drop")), ("activations", ("none",)), ("zero_points", (False,))):
        if document.get(key, allowed[0]) not in allowed:
            raise RecipeError(
                f"--format w4afp8 does not go with {key} {_word(document[key])}: SGLang's loader has one form for all "
                "experts, and its activations are FP8 anyway",
                remedy=f"leave {_OPTIONS.get(key, '--' + key.replace('_', '-'))} out",
            )


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
