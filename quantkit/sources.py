"""What SOURCE on the command line stands for: a recipe, a hub repository or a directory."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from quantkit.checkpoint.hub import Repository, fetch_snapshot, is_offline, parse_hub_id
from quantkit.checkpoint.remote import open_remote
from quantkit.checkpoint.source import Checkpoint, open_checkpoint
from quantkit.errors import RecipeError, SourceError, UsageError
from quantkit.families import FAMILIES, family_of
from quantkit.families.family import Family, Role
from quantkit.recipe import Recipe, builtin_names, builtin_recipe, default_recipe, load_recipe
from quantkit.recipe_files import recipe_summaries
from quantkit.weights.from_config import checkpoint_from_config


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSource:
    """A catalogue, the recipe for it, and where it came from (hub id and commit, if from the hub).

    ``repository``: where the shards still are, of a catalogue that was made from headers alone.
    """

    name: str
    checkpoint: Checkpoint
    family: Family
    recipe: Recipe
    provenance: Mapping[str, str] = field(default_factory=dict)
    repository: Repository | None = None


def resolve_headers(source: str | None, *, keep_source: bool, recipe: str | None = None) -> ResolvedSource:
    """What headers tell of a source, all of which may be wanted later (``fetch_source``).

    A hub client that asks nobody has no headers for us: what is in its cache is taken then, as nothing is fetched.
    """
    return resolve_source(source, recipe=recipe, headers_only=not (keep_source and is_offline()))


def fetch_source(resolved: ResolvedSource) -> ResolvedSource:
    """The same with its shards here, in the hub client's cache; as it was where they are.

    Raises SourceError for a revision that has moved since its headers were read.
    """
    repository = resolved.repository
    if repository is None:
        return resolved
    snapshot = fetch_snapshot(repository.hub_id, repository.revision)
    if snapshot.commit != repository.commit:
        raise SourceError(
            f"{repository} has moved from {repository.commit} to {snapshot.commit} meanwhile",
            remedy="run the same command again",
        )
    return replace(resolved, checkpoint=open_checkpoint(snapshot.directory), repository=None)


def resolve_source(
    source: str | None, *, recipe: str | None = None, config: Path | None = None, headers_only: bool = False
) -> ResolvedSource:
    """Find and catalogue a source; a hub repository is fetched into the hub client's cache.

    ``recipe``: name or file, instead of the one that SOURCE implies. ``headers_only``: no more than that is read of a
    hub repository. ``config``, for planning only: a config.json in place of a checkpoint.
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
        hub = _HubSource(hub_id=origin.hub_id, revision=origin.revision, name=source)
        return _from_hub(hub, recipe or source, headers_only=headers_only)
    if _is_directory(directory):
        return _resolved(directory.resolve().name, open_checkpoint(directory), recipe, {})
    parsed = parse_hub_id(source)
    if parsed is None:
        if "/" in source or source.startswith("."):
            raise SourceError("is not there", file=source, remedy="name a checkpoint directory, a hub id or a recipe")
        raise _neither(source)
    hub_id, revision = parsed
    implied = next((one.name for one in recipe_summaries() if one.hub_id == hub_id), None)
    hub = _HubSource(hub_id=hub_id, revision=revision, name=hub_id.partition("/")[2])
    return _from_hub(hub, recipe or implied, headers_only=headers_only)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _HubSource:
    """``name``: of the output that is made from it, where no other is given."""

    hub_id: str
    revision: str
    name: str


def _from_hub(hub: _HubSource, recipe: str | None, *, headers_only: bool) -> ResolvedSource:
    if headers_only:
        remote = open_remote(hub.hub_id, hub.revision)
        provenance = {"hub_id": hub.hub_id, "commit": remote.repository.commit}
        resolved = _resolved(hub.name, remote.checkpoint, recipe, provenance)
        return replace(resolved, repository=remote.repository)
    snapshot = fetch_snapshot(hub.hub_id, hub.revision)
    provenance = {"hub_id": snapshot.hub_id, "commit": snapshot.commit}
    return _resolved(hub.name, open_checkpoint(snapshot.directory), recipe, provenance)


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
