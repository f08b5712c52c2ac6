"""A recipe: which checkpoint, which modules become INT4 and how, and how to serve the result.

Strict and frozen: an unknown key, a wrong type or a missing value is an error, never a default that changes
bytes.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from quantkit.errors import RecipeError
from quantkit.families import FAMILIES, NEVER_QUANTIZED, Role
from quantkit.numerics.scale_choice import ScaleChoice
from quantkit.patterns import is_matched
from quantkit.recipe_data import Calibration, Source, Strict
from quantkit.recipe_files import read_recipe_document, recipe_paths, recipes_directory
from quantkit.recipe_settings import check_together, implied, implied_engine

Action = Literal["int4", "keep"]
GroupSize = Literal[32, 64, 128]
Engine = Literal["sglang", "vllm"]
LayoutName = Literal["compressed-tensors", "w4afp8"]
Rest = Literal["bf16", "fp8", "fp8-native"]
Activations = Literal["none", "fp8-dynamic"]
Mtp = Literal["int4", "bf16", "fp8", "drop"]
Method = Literal["search", "gptq", "awq"]


class Rule(Strict):
    """What happens to the modules of one role, or to those that a pattern hits.

    A pattern is an exact name, or ``re:`` and a regular expression that must match from the name's start.
    """

    role: Role | None = None
    pattern: str | None = None
    action: Action

    @model_validator(mode="after")
    def _check(self) -> "Rule":
        if (self.role is None) == (self.pattern is None):
            raise ValueError("needs either role or pattern, and not both")
        if self.role in NEVER_QUANTIZED and self.action == "int4":
            raise ValueError(f"{self.role} is never INT4")
        if self.pattern is not None and self.pattern.startswith("re:"):
            try:
                re.compile(self.pattern[3:])
            except re.error as error:
                raise ValueError(f"{self.pattern!r} is no regular expression: {error}") from error
        return self

    def is_hit(self, module: str, role: Role) -> bool:
        """Whether the rule speaks of this module."""
        if self.pattern is None:
            return role is self.role
        return is_matched(self.pattern, module)

    def __str__(self) -> str:
        return f"role {self.role}" if self.pattern is None else f"pattern {self.pattern}"


class Recipe(Strict):
    """``rules``: the first that hits a module wins; a module that none hits is kept.

    ``source`` is None for a checkpoint named on the command line. ``rest``: what kept FP8 weights become; ``fp8``:
    they stay where the ``engines`` load that; ``fp8-native``: all of them, as SGLang alone loads it. ``mtp``: what the
    draft's routed experts become. ``activations``: how engines are told to quantize the input of INT4 modules.
    ``input_scales``: of the experts of each layer, for w4afp8: of gate and up, and of down. ``method``: what chooses
    codes and scales; all but the search need ``calibration``, which a recipe for others leaves open.
    """

    version: Literal[1]
    name: str
    description: str
    source: Source | None = None
    family: str
    target: Literal["int4"]
    layout: LayoutName
    group_size: GroupSize
    scales: ScaleChoice
    signed_scales: bool
    zero_points: bool = False
    activations: Activations = "none"
    input_scales: dict[str, tuple[float, float]] = Field(default_factory=dict)
    method: Method = "search"
    calibration: Calibration | None = None
    rest: Rest
    mtp: Mtp = "int4"
    rules: tuple[Rule, ...]
    engines: dict[Engine, tuple[str, ...]] = Field(default_factory=dict)

    @field_validator("version", "group_size", mode="before")
    @classmethod
    def _refuse_bool(cls, value: object) -> object:
        # Literal[1] accepts true
        if isinstance(value, bool):
            raise ValueError(f"{str(value).lower()} is not a number")
        return value

    @field_validator("family")
    @classmethod
    def _check_family(cls, value: str) -> str:
        if value not in FAMILIES:
            raise ValueError(f"unknown model family {value!r}{_near(value, FAMILIES)}")
        return value


def load_recipe(path: Path) -> Recipe:
    """A recipe from a YAML file."""
    return parse_recipe(read_recipe_document(path), where=path.name)


def builtin_names() -> tuple[str, ...]:
    """Names of the shipped recipes."""
    return tuple(recipe_paths())


def builtin_recipe(name: str) -> Recipe:
    """A shipped recipe by name."""
    paths = recipe_paths()
    if name not in paths:
        raise RecipeError(
            f"unknown recipe {name!r}{_near(name, paths)}", remedy=f"shipped are {', '.join(paths) or 'none'}"
        )
    return load_recipe(paths[name])


def default_recipe(family_name: str, *, has_experts: bool) -> Recipe:
    """For a checkpoint without a recipe: routed experts, or every layer matrix where there are none."""
    dense_roles = (Role.ATTENTION, Role.DENSE_MLP) if FAMILIES[family_name].is_known else (Role.LINEAR,)
    roles = (Role.ROUTED_EXPERT,) if has_experts else dense_roles
    return parse_recipe(
        {
            "version": 1,
            "name": f"{FAMILIES[family_name].name}-default",
            "description": "Routed experts INT4, the rest kept"
            if has_experts
            else "Layer matrices INT4, the rest kept",
            "family": family_name,
            "target": "int4",
            "layout": "compressed-tensors",
            "group_size": 32,
            "scales": "search",
            "signed_scales": True,
            "rest": "bf16",
            "rules": [{"role": role.value, "action": "int4"} for role in roles],
        },
        where="default recipe",
    )


def override(
    recipe: Recipe,
    *,
    engine: Engine | None = None,
    targets: Sequence[str] = (),
    ignore: Sequence[str] = (),
    **settings: object,
) -> Recipe:
    """What the command line changes. ``targets`` replace the rules; ``ignore`` go before them as keep.

    ``engine``: the only one that the output is for, with what the recipe says of it; by default that which alone loads
    what is asked for. ``settings``: fields of the recipe; None leaves one as it is.
    """
    changes = {key: value for key, value in settings.items() if value is not None}
    _check_options(changes, (*targets, *ignore))
    document = recipe_document(recipe)
    document |= implied(changes) | changes
    only = engine or implied_engine(changes)
    if only is not None and (engine is not None or not document["engines"] or only in document["engines"]):
        document["engines"] = {only: document["engines"].get(only, [])}
    if targets:
        document["rules"] = _pattern_rules(targets, "int4")
    document["rules"] = _pattern_rules(ignore, "keep") + document["rules"]
    return parse_recipe(document, where=recipe.name)


_CHOICES: Mapping[str, tuple[object, ...]] = {
    "layout": get_args(LayoutName),
    "activations": get_args(Activations),
    "group_size": get_args(GroupSize),
    "scales": get_args(ScaleChoice),
    "method": get_args(Method),
    "rest": get_args(Rest),
    "mtp": get_args(Mtp),
}


def _check_options(changes: Mapping[str, object], patterns: Iterable[str]) -> None:
    """The options by their own names: nobody has written the recipe that they change."""
    for key, value in changes.items():
        if key in _CHOICES and value not in _CHOICES[key]:
            option = "--format" if key == "layout" else f"--{key.replace('_', '-')}"
            words = [str(one) for one in _CHOICES[key]]
            near = _near(value, words) if isinstance(value, str) else ""
            remedy = f"choose {', '.join(words[:-1])} or {words[-1]}"
            raise RecipeError(f"{option} {value} is not there{near}", remedy=remedy)
    for pattern in patterns:
        try:
            is_matched(pattern, "")
        except re.error as error:
            raise RecipeError(
                f"{pattern!r} is no regular expression ({error})", remedy="correct --targets or --ignore"
            ) from error


def recipe_document(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON types, every field resolved; it validates to an equal recipe. No method is the search."""
    document: dict[str, Any] = recipe.model_dump(mode="json")
    document["rules"] = [rule.model_dump(mode="json", exclude_none=True) for rule in recipe.rules]
    if recipe.method == "search":  # as it was before there were others
        del document["method"], document["calibration"]
    return document


def decide(rules: Sequence[Rule], module: str, role: Role) -> tuple[Action, int | None]:
    """What happens to a module (its name has no ``.weight``), and the number of the rule that says so."""
    for index, rule in enumerate(rules):
        if rule.is_hit(module, role):
            if rule.action == "int4" and role in NEVER_QUANTIZED:
                raise RecipeError(
                    f"the {rule} would quantize {module}, which is a {role} and never INT4",
                    remedy=f"narrow it, or add --ignore 're:.*{re.escape(module.rpartition('.')[2])}$'",
                )
            return rule.action, index
    return "keep", None


def _pattern_rules(patterns: Iterable[str], action: Action) -> list[dict[str, Any]]:
    return [{"pattern": pattern, "action": action} for pattern in patterns]


def _near(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def parse_recipe(document: dict[str, Any], *, where: str) -> Recipe:
    """In JSON, since strict mode takes a list for a tuple only there; a YAML date becomes a string."""
    try:
        text = json.dumps(document, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"holds what JSON cannot ({error})", file=where, remedy="see any shipped recipe") from error
    try:
        recipe = Recipe.model_validate_json(text)
    except ValidationError as error:
        raise RecipeError(_explain(error), file=where, remedy="correct this key") from error
    check_together(recipe.model_dump(), where)
    return recipe


def _explain(error: ValidationError) -> str:
    """The first problem in one line. A misspelt key comes before the field that it left missing."""
    problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    place = ".".join(str(part) for part in problem["loc"]) or "recipe"
    if problem["type"] == "extra_forbidden":
        missing = [str(other["loc"][-1]) for other in problems if other["type"] == "missing"]
        known = (*missing, *Recipe.model_fields, *Rule.model_fields)
        return f"{place}: unknown key{_near(str(problem['loc'][-1]), known)}"
    if problem["type"] == "missing":
        return f"{place}: is missing"
    text = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {text[:1].lower()}{text[1:]}"


__all__ = [
    "Action",
    "Calibration",
    "Recipe",
    "Rule",
    "Source",
    "builtin_names",
    "builtin_recipe",
    "decide",
    "default_recipe",
    "load_recipe",
    "override",
    "parse_recipe",
    "recipe_document",
    "recipes_directory",
]
