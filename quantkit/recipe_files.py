"""Where recipes lie and how their YAML is read: no pydantic, so that listing them is quick."""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from quantkit.errors import RecipeError

_PACKAGE = Path(__file__).parent


class _StrictLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that stands twice: YAML would let the last one win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_line: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in first_line:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key_node.value!r} stands here and in line {first_line[key_node.value]}",
                    problem_mark=key_node.start_mark,
                )
            first_line[key_node.value] = key_node.start_mark.line + 1
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSummary:
    """One line of a listing."""

    name: str
    hub_id: str
    family: str
    target: str
    group_size: int
    description: str


def read_recipe_document(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, not validated; what is wrong with the YAML comes with file and line."""
    try:
        if not path.is_file():
            raise OSError("not a regular file")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot be read ({error})", file=path, remedy="check the path") from error
    try:
        # a subclass of the safe loader
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=_StrictLoader)):
            raise RecipeError("holds an alias (*name)", file=path.name, remedy="write the value out")
        document = yaml.load(text, Loader=_StrictLoader)  # noqa: TID251
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        where = path.name if mark is None else f"{path.name}:{mark.line + 1}"
        raise RecipeError(problem, file=where, remedy="correct the YAML") from error
    if not isinstance(document, dict):
        raise RecipeError("holds no mapping of keys to values", file=path.name, remedy="see any shipped recipe")
    return document


def recipes_directory() -> Path:
    """The shipped recipes: inside the package in a wheel, beside it in a checkout."""
    packaged = _PACKAGE / "_recipes"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "recipes"


def recipe_paths() -> dict[str, Path]:
    """Name to file of every shipped recipe, in order of names."""
    paths = {path.stem: path for path in recipes_directory().glob("*.yaml")}
    return dict(sorted(paths.items()))


def recipe_summaries() -> tuple[RecipeSummary, ...]:
    """What a listing shows of every shipped recipe."""
    documents = ((name, read_recipe_document(path)) for name, path in recipe_paths().items())
    return tuple(
        RecipeSummary(
            name=name,
            hub_id=document["source"]["hub_id"],
            family=document["family"],
            target=document["target"],
            group_size=document["group_size"],
            description=" ".join(document["description"].split()),
        )
        for name, document in documents
    )


def recipe_config(name: str) -> dict[str, Any]:
    """The config.json of a shipped recipe's source, reduced to what decides tensors, sizes and whether it brings code.

    A file may stand on another one (``same_as``) and say only what differs.
    """
    document: dict[str, Any] = json.loads((recipes_directory() / "configs" / f"{name}.json").read_text("utf-8"))
    base = document.pop("same_as", None)
    return document if base is None else recipe_config(base) | document


def recipe_text(name: str) -> str:
    """A shipped recipe as it was written, comments included."""
    paths = recipe_paths()
    if name not in paths:
        near = get_close_matches(name, paths, n=1)
        raise RecipeError(
            f"unknown recipe {name!r}",
            remedy=f"did you mean {near[0]!r}?" if near else f"shipped are {', '.join(paths)}",
        )
    return paths[name].read_text(encoding="utf-8")
