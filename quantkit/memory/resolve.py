"""What MODEL on the command line stands for: a recipe, a config.json, a checkpoint directory or a hub repository.

No recipe is parsed and no weights are fetched: a recipe name stands for the config that is shipped with it.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.checkpoint.hub import parse_hub_id
from quantkit.checkpoint.json_files import read_json
from quantkit.checkpoint.remote import open_remote
from quantkit.checkpoint.source import Checkpoint, open_checkpoint
from quantkit.errors import RecipeError, SourceError, UsageError
from quantkit.memory.model import Model, model_from_checkpoint, model_from_config
from quantkit.recipe_files import recipe_config, recipe_paths, recipe_summaries


@dataclass(frozen=True, kw_only=True)
class Named:
    """What a name stands for. ``checkpoint``: where headers were read; ``directory``: where it lies on this machine."""

    model: Model
    checkpoint: Checkpoint | None = None
    directory: Path | None = None


def resolve_model(name: str | None) -> Model | None:
    """The model by its name; without a name the checkpoint in the current directory, or None where there is none."""
    if name is None:
        return _from_directory(Path()).model if Path(CONFIG_NAME).is_file() else None
    return resolve_named(name).model


def resolve_named(name: str) -> Named:
    """The model by its name, with where it lies."""
    if not name:
        raise UsageError("MODEL is empty", remedy="name a recipe, a hub id, a config.json or a directory")
    path = Path(name)
    if name in recipe_paths():
        if path.is_dir():
            raise UsageError(f"{name!r} is a recipe and a directory here", remedy=f"write ./{name} for the directory")
        return Named(model=recipe_model(name))
    if path.is_dir():
        return _from_directory(path)
    if path.suffix == ".json" or path.is_file():
        return _from_config(path)
    if (parsed := parse_hub_id(name)) is not None:
        remote = open_remote(*parsed)
        num_shards = len(remote.checkpoint.shards)
        model = model_from_checkpoint(
            name,
            remote.checkpoint,
            weights_from=f"headers of {_shards(num_shards)} on the hub, {remote.repository.commit[:12]}",
        )
        return Named(model=model, checkpoint=remote.checkpoint)
    if "/" in name or name.startswith("."):
        raise SourceError("is not there", file=name, remedy="name a recipe, a config.json, a directory or a hub id")
    near = get_close_matches(name.lower(), recipe_paths(), n=2, cutoff=0.5)
    raise RecipeError(
        f"{name!r} is neither a recipe nor a directory here",
        remedy=f"did you mean {' or '.join(near)}?"
        if near
        else "see quantkit recipes, or name a hub id or a directory",
    )


def recipe_model(name: str) -> Model:
    """Of a shipped recipe: the config of its source."""
    summary = next(summary for summary in recipe_summaries() if summary.name == name)
    return model_from_config(
        name,
        recipe_config(name),
        weights_from=f"config of {summary.hub_id} as shipped (name the hub id to count its headers)",
        int4_group_size=summary.group_size,
    )


def _from_config(path: Path) -> Named:
    config = read_json(path, what="name a config.json, a recipe, a directory or a hub id")
    name = _one_line(path.resolve().parent.name if path.name == CONFIG_NAME else path.stem)
    model = model_from_config(name, config, weights_from=f"{path.name} taken at its word (headers would be counted)")
    return Named(model=model, directory=path.parent)


def _from_directory(directory: Path) -> Named:
    if not any(directory.glob("*.safetensors")):
        return _from_config(directory / CONFIG_NAME)
    checkpoint = open_checkpoint(directory)
    num_shards, name = len(checkpoint.shards), _one_line(directory.resolve().name)
    model = model_from_checkpoint(name, checkpoint, weights_from=f"headers of {_shards(num_shards)} in {name}")
    return Named(model=model, checkpoint=checkpoint, directory=directory)


def _one_line(name: str) -> str:
    """A folder may be called anything, and a plan is read line by line."""
    return " ".join(name.split())


def _shards(count: int) -> str:
    return "1 shard" if count == 1 else f"{count} shards"
