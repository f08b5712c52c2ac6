"""What SOURCE on the command line stands for: a recipe, a hub repository or a directory."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from quantkit.checkpoint.hub import fetch_snapshot
from quantkit.checkpoint.source import Checkpoint, open_checkpoint
from quantkit.errors import RecipeError, SourceError, UsageError
from quantkit.families import FAMILIES, family_of
from quantkit.families.family import Family, Role
from quantkit.recipe import Recipe, builtin_names, builtin_recipe, default_recipe, load_recipe
from quantkit.recipe_files import recipe_summaries
from quantkit.weights.from_config import checkpoint_from_config

_HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSource:
    """A catalogue, the recipe for it, and where it came from (hub id and commit, if from the hub)."""

    name: str
    checkpoint: Checkpoint
    family: Family
    recipe: Recipe
    provenance: Mapping[str, str] = field(default_factory=dict)


def resolve_source(source: str | None, *, recipe: str | None = None, config: Path | None = None) -> ResolvedSource:
    """Find and catalogue a source; a hub repository is fetched into the hub client's cache.

    ``recipe``: name or file, instead of the one that SOURCE implies. ``config``: a config.json in place of a
    checkpoint, for planning only.
    """
    if config is not None:
        if source is not None and source not in builtin_names():
            raise UsageError("--config stands in place of a SOURCE directory", remedy="leave one of them out")
        checkpoint = checkpoint_from_config(config)
        return _resolved(config.stem, checkpoint, recipe or source, {})
    if not source:
        raise UsageError("SOURCE is missing", remedy="name a recipe, a hub id or a directory")
    directory = Path(source)
    if source in builtin_names():
        if _is_directory(directory):
            raise UsageError(
                f"{source!r} is a recipe and a directory here", remedy=f"write ./{source} for the directory"
            )
        origin = _recipe(recipe or source).source
        if origin is None:
            raise RecipeError(f"recipe {recipe or source} names no source", remedy="name a directory or a hub id")
        return _from_hub(origin.hub_id, origin.revision, source, recipe or source)
    if _is_directory(directory):
        return _resolved(directory.resolve().name, open_checkpoint(directory), recipe, {})
    match = _HUB_ID.fullmatch(source)
    if match is None or source.startswith((".", "/", "~")):
        if "/" in source or source.startswith("."):
            raise SourceError("is not there", file=source, remedy="name a checkpoint directory, a hub id or a recipe")
        raise _neither(source)
    hub_id = match["id"]
    implied = next((one.name for one in recipe_summaries() if one.hub_id == hub_id), None)
    return _from_hub(hub_id, match["revision"] or "main", hub_id.partition("/")[2], recipe or implied)


def _neither(source: str) -> RecipeError:
    """A plain word that is no directory here and no recipe, with the nearest of both."""
    near_recipe = get_close_matches(source, builtin_names(), n=1)
    near_directory = get_close_matches(source, [path.name for path in Path().iterdir() if path.is_dir()], n=1)
    near = [f"./{name}" for name in near_directory] + near_recipe
    remedy = f"did you mean {' or '.join(near)}?" if near else "see quantkit recipes, or name a directory"
    return RecipeError(f"{source!r} is neither a directory here nor a recipe", remedy=remedy)


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:
        raise SourceError(f"cannot be looked at ({error.strerror})", file=path, remedy="check the path") from error


def _from_hub(hub_id: str, revision: str, name: str, recipe: str | None) -> ResolvedSource:
    snapshot = fetch_snapshot(hub_id, revision)
    provenance = {"hub_id": snapshot.hub_id, "commit": snapshot.commit}
    return _resolved(name, open_checkpoint(snapshot.directory), recipe, provenance)


def _recipe(name_or_path: str) -> Recipe:
    if name_or_path.endswith((".yaml", ".yml")):
        return load_recipe(Path(name_or_path))
    return builtin_recipe(name_or_path)


def _resolved(name: str, checkpoint: Checkpoint, recipe: str | None, provenance: Mapping[str, str]) -> ResolvedSource:
    family = family_of(checkpoint.config)
    if recipe is None:
        has_experts = any(family.role_of(tensor) == Role.ROUTED_EXPERT for tensor in checkpoint.tensors)
        chosen = default_recipe(family.name, has_experts=has_experts)
    else:
        chosen = _recipe(recipe)
        if FAMILIES[chosen.family] is not family:
            raise RecipeError(
                f"recipe {chosen.name} is for {chosen.family}, the checkpoint is {family.name}",
                remedy="choose another --recipe, or leave it out",
            )
    return ResolvedSource(name=name, checkpoint=checkpoint, family=family, recipe=chosen, provenance=provenance)
