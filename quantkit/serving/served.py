"""What a pool serves: a conversion that a recipe plans, a published source, a directory, a hub repository."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.file_names import CONFIG_NAME, MANIFEST_NAME
from quantkit.checkpoint.reader import hash_file
from quantkit.checkpoint.source import Checkpoint, quantization_section
from quantkit.engines.launch import Launch
from quantkit.engines.verdicts import EngineReport
from quantkit.errors import SourceError
from quantkit.integrity.manifest import read_manifest
from quantkit.memory.model import Model
from quantkit.memory.resolve import Named, resolve_named
from quantkit.memory.scheme import Scheme
from quantkit.memory.tensor_groups import by_layer
from quantkit.plan.make import make_plan
from quantkit.recipe import builtin_recipe
from quantkit.recipe_files import recipe_paths, recipe_summaries
from quantkit.verify.loading import check_loading, check_plan
from quantkit.weights.from_config import assumed_checkpoint

CONVERTED = "./{name}-int4"  # where convert puts what is given no -o
_Check = Callable[[Launch], EngineReport]


@dataclass(frozen=True, kw_only=True)
class Served:
    """``path``: as a launch line names it. ``config``: as the engine will read it. ``scheme``: None as it is stored.

    ``names``: what it and its source are called. ``source_config_sha256``: of the config that a conversion read.
    ``revision``: of a hub repository, where one was named.
    """

    path: str
    directory: Path | None
    model: Model
    scheme: Scheme | None
    config: Mapping[str, Any]
    names: tuple[str, ...]
    check: _Check
    revision: str | None = None
    source_config_sha256: str | None = None

    @property
    def stored(self) -> Scheme:
        return self.scheme or self.model.scheme

    @property
    def method(self) -> str:
        """``quant_method`` of the config; nothing where weights are not quantized."""
        return str(quantization_section(self.config)[1].get("quant_method", ""))

    @property
    def is_local(self) -> bool:
        """Whether ``path`` is a place on a disk, and no repository of the hub."""
        return self.path.startswith((".", "/"))

    @property
    def has_remote_code(self) -> bool:
        return bool(self.config.get("auto_map"))

    @property
    def has_mtp(self) -> bool:
        """Whether it holds draft layers, and not only says so."""
        first = self.model.num_layers
        layers = range(first, first + self.model.num_mtp_layers)
        return bool(layers) and not by_layer(self.model.tensors(self.stored)).keys().isdisjoint(layers)


def resolve_served(name: str, *, is_converted: bool) -> Served:
    """By the names that ``memory-plan`` takes; a recipe stands for its conversion, or else for its source."""
    if name in recipe_paths() and is_converted:
        return _conversion(name)
    return _published(resolve_named(name), name)


def _conversion(name: str) -> Served:
    """What the recipe makes of its source's config."""
    named, recipe = resolve_named(name), builtin_recipe(name)
    checkpoint = assumed_checkpoint(named.model.config, Path(CONFIG_NAME))
    plan = make_plan(recipe, named.model.family, checkpoint)
    is_int4 = named.model.scheme.experts == "int4"
    scheme = None if is_int4 else Scheme(experts="int4", rest=recipe.rest, group_size=recipe.group_size)
    return Served(
        path=CONVERTED.format(name=name),
        directory=None,
        model=named.model,
        scheme=scheme,
        config=plan.config,
        names=(name, *([recipe.source.hub_id] if recipe.source else [])),
        check=lambda launch: check_plan(plan, (launch,))[0],
    )


def _published(named: Named, name: str) -> Served:
    model = named.model
    hub_id = next((one.hub_id for one in recipe_summaries() if one.name == name), None)
    # on other nodes, and for a unit or a container, only a whole path says where it lies
    directory = None if named.directory is None else named.directory.absolute()
    path, _, revision = name.partition("@") if directory is None else (str(directory), "", "")
    path = hub_id or path
    names: tuple[str, ...] = (name, path)
    sha256 = None
    if named.directory is not None and (named.directory / MANIFEST_NAME).is_file():
        document = read_manifest(named.directory).document
        source, recipe = document["source"], document["recipe"]
        names = (str(source.get("hub_id", "")), str(recipe.get("name", "")), *names)
        sha256 = source.get("config_sha256")
    return Served(
        path=path,
        revision=revision or None,
        directory=directory,
        model=model,
        scheme=None,
        config=model.config,
        names=tuple(filter(None, names)),
        check=lambda launch: check_loading(_checkpoint(named), model.family, launch),
        source_config_sha256=sha256,
    )


def _checkpoint(named: Named) -> Checkpoint:
    if named.checkpoint is not None:
        return named.checkpoint
    return assumed_checkpoint(named.model.config, (named.directory or Path()) / CONFIG_NAME)


def same_model(prefill: Served, output: Served) -> list[str]:
    """Why what one pool writes may be no cache for the other, in words; nothing where all is well.

    Raises SourceError for two models.
    """
    first, second = prefill.model, output.model
    for what, one, other in (
        ("family", first.family.name, second.family.name),
        ("number of layers", first.num_layers, second.num_layers),
        ("KV cache", first.kv_shape, second.kv_shape),
    ):
        if one != other:
            raise SourceError(
                f"is another model than {output.path}: another {what}",
                file=prefill.path,
                remedy="name the source of the conversion with --prefill",
            )
    wanted = output.source_config_sha256
    config = None if prefill.directory is None else prefill.directory / CONFIG_NAME
    if wanted is not None and config is not None and hash_file(config) != wanted:
        return [f"{prefill.path} is not the source that {output.path} records: its config.json differs"]
    return []
