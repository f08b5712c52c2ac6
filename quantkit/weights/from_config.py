"""A catalogue without weights: what a published checkpoint of this config most likely holds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.json_files import read_json
from quantkit.checkpoint.sidecars import Sidecars
from quantkit.checkpoint.source import Checkpoint, Shard, quantization_section
from quantkit.errors import SourceError
from quantkit.families import family_of
from quantkit.recipe_files import recipe_config, recipes_directory
from quantkit.weights.source_form import source_form
from quantkit.weights.stored import stored_specs

VIRTUAL_SHARD = "model.safetensors"


def checkpoint_from_config(path: Path) -> Checkpoint:
    """Of a config.json. Raises SourceError for a family that is not known."""
    config = read_json(path, what="name a config.json")
    base = config.get("same_as")
    if isinstance(base, str) and path.parent.resolve() == (recipes_directory() / "configs").resolve():
        config = recipe_config(path.stem)  # of those that are shipped some say only what differs
    return assumed_checkpoint(config, path)


def assumed_checkpoint(config: Mapping[str, Any], path: Path) -> Checkpoint:
    """Every tensor in one shard that does not exist; ``path`` is where the config lies, or would."""
    family = family_of(config)
    if not family.is_known:
        raise SourceError(
            f"model_type {config.get('model_type')!r} is not a known family, so its tensors are not known",
            file=path.name,
            remedy="plan from the checkpoint directory instead: its headers tell",
        )
    _, section = quantization_section(config)
    form = source_form(section)
    tensors: dict[str, StoredTensor] = {}
    position = 0
    shard_path = path.parent / VIRTUAL_SHARD
    for name, spec in stored_specs(family.assumed_tensors(config), form):
        tensors[name] = StoredTensor(name, spec, shard_path, position)
        position += spec.num_bytes
    shard = Shard(name=VIRTUAL_SHARD, path=shard_path, file_bytes=position, tensors=tuple(tensors.values()))
    return Checkpoint(
        directory=path.parent,
        config=config,
        quantization=section,
        shards=(shard,),
        tensors=tensors,
        sidecars=Sidecars(copied=(), skipped=()),
        is_assumed=True,
    )
