"""Forms of an output that need other settings, one table: what follows from each, and what does not go with it.

The forms are not of one recipe key: a layout, the storage of the rest, the engines' activations, zero points.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.errors import RecipeError

_DOCUMENTS = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """An output whose recipe has ``value`` as ``setting``.

    ``needs``: the only values of other settings, taken where none is given; ``allows``: what others may be.
    ``engine``: the one that alone loads it. ``reads_positive_scales``: its kernels are not known to read others.
    """

    setting: str
    value: object
    option: str
    needs: Mapping[str, object] = field(default_factory=dict)
    allows: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    engine: str | None = None
    reads_positive_scales: bool = False

    def is_asked_for(self, document: Mapping[str, Any]) -> bool:
        return bool(document.get(self.setting) == self.value)


W4A8_REMEDY = "convert the FP8 source again with --group-size 128 --positive-scales"
_W4A8 = {"group_size": 128, "signed_scales": False}
FORMS: tuple[Form, ...] = (
    Form(
        setting="layout",
        value="w4afp8",
        option="--format w4afp8",
        needs=_W4A8 | {"rest": "fp8"},
        # one form for all experts, and FP8 activations anyway
        allows={
            "rest": ("fp8", "fp8-native"),
            "mtp": ("int4", "drop"),
            "activations": ("none",),
            "zero_points": (False,),
        },
        engine="sglang",
        reads_positive_scales=True,
    ),
    Form(
        setting="activations",
        value="fp8-dynamic",
        option="--activations fp8-dynamic",
        needs=_W4A8,
        allows={"zero_points": (False,)},
        reads_positive_scales=True,
    ),
    Form(
        setting="rest",
        value="fp8-native",
        option="--rest fp8-native",
        allows={"mtp": ("int4", "bf16", "drop")},
        engine="sglang",
    ),
    Form(
        setting="zero_points",
        value=True,
        option="--zero-points",
        needs={"signed_scales": False},
        engine="vllm",
    ),
)
_OPTIONS = {
    "group_size": "--group-size",
    "signed_scales": "--positive-scales",
    "rest": "--rest",
    "mtp": "--mtp",
    "activations": "--activations",
    "zero_points": "--zero-points",
}


def forms_of(document: Mapping[str, Any]) -> tuple[Form, ...]:
    """The forms that a recipe's document, or a part of it, asks for."""
    return tuple(form for form in FORMS if form.is_asked_for(document))


def implied(given: Mapping[str, object]) -> dict[str, object]:
    """What the settings given on the command line make of others that are not."""
    needed = {name: value for form in forms_of(given) for name, value in form.needs.items()}
    return {name: value for name, value in needed.items() if name not in given}


def implied_engine(given: Mapping[str, object]) -> str | None:
    """The engine that alone loads what the settings ask for; None where both may."""
    return next((form.engine for form in forms_of(given) if form.engine), None)


def check_together(document: Mapping[str, Any], where: str) -> None:
    """Raise RecipeError for settings of a whole recipe that no output could have.

    ``where``: a file, whose keys are named, or the recipe that options have changed.
    """
    is_file = where.endswith(_DOCUMENTS)
    for form in forms_of(document):
        allowed: dict[str, tuple[object, ...]] = {name: (value,) for name, value in form.needs.items()}
        allowed.update(form.allows)
        for name, values in allowed.items():
            if document.get(name, values[0]) not in values:
                what = f"{form.setting} {_word(form.value)}" if is_file else form.option
                raise RecipeError(
                    f"{what} does not go with {name} {_word(document[name])}",
                    file=where if is_file else None,
                    remedy=_key_remedy(name, values) if is_file else _option_remedy(name, values),
                )
    engines = {form.engine: form for form in forms_of(document) if form.engine}
    if len(engines) > 1:
        first, second = (form.option for form in engines.values())
        raise RecipeError(f"{first} and {second} are of different engines", remedy="leave one of them out")
    _check_method(document, where if is_file else None)
    if document.get("input_scales") and document.get("layout") != "w4afp8":
        raise RecipeError("input scales are of w4afp8 alone", remedy="give --format w4afp8, or leave --stats out")


def _check_method(document: Mapping[str, Any], file: str | None) -> None:
    """Calibrated methods choose symmetric codes and their own scales."""
    method = document.get("method", "search")
    if method == "search":
        if document.get("calibration"):
            raise RecipeError("the search sees no inputs", file=file, remedy="leave calibration out, or name a method")
        return
    if document.get("zero_points"):
        raise RecipeError(f"--method {method} makes no zero points", file=file, remedy="leave --zero-points out")
    if method == "awq" and document.get("input_scales"):
        raise RecipeError(
            "--method awq changes the inputs of down, of which --stats speaks",
            file=file,
            remedy="leave one of them out",
        )
    if document.get("scales", "search") != "search":
        raise RecipeError(
            f"--method {method} chooses its own scales", file=file, remedy="leave --scales out, or the method"
        )


def _key_remedy(name: str, values: tuple[object, ...]) -> str:
    return f"set {name} to {' or '.join(map(_word, values))}"


def _option_remedy(name: str, values: tuple[object, ...]) -> str:
    option = _OPTIONS[name]
    if values in ((False,), ("none",)) and name != "signed_scales":
        return f"leave {option} out"
    return f"give {option}" if values == (False,) else f"give {option} {' or '.join(map(_word, values))}"


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
