"""A checkpoint directory as a catalogue: config, index and every shard header, compared with each other.

Nothing outside the directory is read, except through the links of a hub cache (a snapshot is made of links into
``blobs/``). No tensor data is read here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from quantkit.checkpoint.header import StoredTensor, read_header
from quantkit.checkpoint.json_files import read_json
from quantkit.checkpoint.links import Boundary
from quantkit.checkpoint.sidecars import Sidecars, find_sidecars
from quantkit.errors import SourceError

INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
HF_QUANT_CONFIG_NAME = "hf_quant_config.json"  # where ModelOpt declares its quantization
_SHARD_OF_MANY = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One safetensors file; ``tensors`` in file order."""

    name: str
    path: Path
    file_bytes: int
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a checkpoint directory holds. ``tensors`` maps every name to where it is stored."""

    directory: Path
    config: Mapping[str, Any]
    quantization: Mapping[str, Any]
    shards: tuple[Shard, ...]
    tensors: Mapping[str, StoredTensor]
    sidecars: Sidecars
    is_assumed: bool = False  # made up from a config: there are no shards

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(tensor.spec.num_bytes for tensor in self.tensors.values())


def open_checkpoint(directory: Path) -> Checkpoint:
    """Catalogue of a checkpoint directory. Raises SourceError for everything that does not fit together."""
    if not directory.is_dir():
        raise SourceError("is not a directory", file=directory, remedy="name a checkpoint directory")
    boundary = Boundary(directory)
    _check_link(directory / CONFIG_NAME, boundary)
    config = read_json(directory / CONFIG_NAME, what="a checkpoint needs its config.json")
    shards = _read_shards(directory, boundary)
    return Checkpoint(
        directory=directory,
        config=config,
        quantization=_quantization(directory, config),
        shards=shards,
        tensors=_catalogue(shards),
        sidecars=find_sidecars(directory, boundary),
    )


def quantization_section(config: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Where the config declares its quantization (``None`` for the top level, else the parent key), and the section.

    Engines look at the top level, then inside ``text_config``, then at the old ``compression_config``.
    """
    text = config.get("text_config")
    places: list[tuple[str | None, Any]] = [(None, config.get("quantization_config"))]
    if isinstance(text, Mapping):
        places.append(("text_config", text.get("quantization_config")))
    places.append((None, config.get("compression_config")))
    found = [(parent, section) for parent, section in places if section]
    if not found:
        return None, {}
    if len(found) > 1 and any(section != found[0][1] for _, section in found):
        raise SourceError(
            "declares quantization in two places with different content",
            file=CONFIG_NAME,
            remedy="keep one quantization_config",
        )
    parent, section = found[0]
    if not isinstance(section, Mapping):
        raise SourceError("quantization_config is not an object", file=CONFIG_NAME, remedy="download it again")
    return parent, section


def _quantization(directory: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    _, section = quantization_section(config)
    if not (directory / HF_QUANT_CONFIG_NAME).is_file():
        return section
    document = read_json(directory / HF_QUANT_CONFIG_NAME, what="it declares the quantization")
    inner = document.get("quantization")
    if not isinstance(inner, dict):
        raise SourceError("has no quantization section", file=HF_QUANT_CONFIG_NAME, remedy="download it again")
    declared = {"quant_method": "modelopt", **inner}
    if section and str(section.get("quant_algo", inner.get("quant_algo"))) != str(inner.get("quant_algo")):
        _fail("contradicts config.json", file=HF_QUANT_CONFIG_NAME, remedy="keep the one that belongs to the shards")
    if section and not str(section.get("quant_method", "modelopt")).startswith("modelopt"):
        _fail("stands beside another quantization", file=HF_QUANT_CONFIG_NAME, remedy="keep the one that is true")
    return section or declared


def _fail(message: str, *, file: str | Path, remedy: str, tensor: str | None = None) -> NoReturn:
    raise SourceError(message, file=file, remedy=remedy, tensor=tensor)


def _check_link(path: Path, boundary: Boundary) -> None:
    if not boundary.holds(path):
        _fail(
            "is a link that leaves the checkpoint",
            file=path.name,
            remedy="name the directory that it points to: nothing outside the source is read",
        )


def _read_shards(directory: Path, boundary: Boundary) -> tuple[Shard, ...]:
    try:
        present = {path.name: path for path in sorted(directory.iterdir()) if path.name.endswith(".safetensors")}
    except OSError as error:
        _fail(f"cannot be listed ({error.strerror})", file=directory, remedy="check its permissions")
    index_path = _index_path(directory)
    if index_path is not None:
        _check_link(index_path, boundary)
    weight_map = None if index_path is None else _weight_map(index_path)
    if weight_map is not None and index_path is not None:
        _check_shard_names(set(weight_map.values()), present, index_path.name)
    if not present:
        _fail("holds no .safetensors file", file=directory, remedy="only safetensors are read, never pickles")
    if weight_map is None:
        _check_numbering(present)
    shards = []
    for name, path in present.items():
        if not path.is_file():
            _fail("is not a file (a broken link?)", file=name, remedy="download this shard again")
        _check_link(path, boundary)
        header = read_header(path)
        shards.append(Shard(name=name, path=path, file_bytes=header.file_bytes, tensors=header.tensors))
    if weight_map is not None and index_path is not None:
        _check_index(weight_map, shards, index_path.name)
    return tuple(shards)


def _index_path(directory: Path) -> Path | None:
    found = sorted(directory.glob("*.safetensors.index.json"))
    if directory / INDEX_NAME in found:
        return directory / INDEX_NAME
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        _fail(f"holds several indexes ({names})", file=directory, remedy="keep the one that belongs to it")
    return found[0] if found else None


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path, what="download it again").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        _fail("has no weight_map of strings", file=path.name, remedy="download the index again")
    return weight_map


def _check_shard_names(named: set[str], present: Mapping[str, Path], index_name: str) -> None:
    for name in sorted(named):
        if Path(name).name != name or name in {"", ".", ".."} or "\\" in name or "\0" in name:
            _fail(
                f"names the shard {name!r}, which is not a plain file name",
                file=index_name,
                remedy="nothing outside the checkpoint is read; get the checkpoint from its publisher",
            )
        if not name.endswith(".safetensors"):
            _fail(f"names {name!r}, which is not a safetensors file", file=index_name, remedy="convert it first")
        if name not in present:
            _fail(f"the shard is named by {index_name} and missing", file=name, remedy="download this shard")
    for name in sorted(set(present) - named):
        _fail(
            f"is not named by {index_name}",
            file=name,
            remedy="download the index that belongs to it, or move the file away",
        )


def _check_numbering(present: Mapping[str, Path]) -> None:
    """Without an index, ``x-00002-of-00005`` says that four others belong to it."""
    sets: dict[tuple[str, str], str] = {}
    for name in present:
        match = _SHARD_OF_MANY.fullmatch(name)
        if match is None:
            continue
        if not 1 <= int(match["number"]) <= int(match["count"]):
            _fail("has a number that its own name rules out", file=name, remedy="move it away: it is of another set")
        sets.setdefault((match["stem"], match["count"]), name)
    for (stem, count), example in sets.items():
        for number in range(1, int(count) + 1):
            other = f"{stem}-{number:0{len(count)}d}-of-{count}.safetensors"
            if other not in present:
                _fail(f"the shard is missing ({example} is there)", file=other, remedy="download this shard")


def _check_index(weight_map: Mapping[str, str], shards: list[Shard], index_name: str) -> None:
    stored = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    for name, shard_name in weight_map.items():
        if stored.get(name) != shard_name:
            where = f"is in {stored[name]}" if name in stored else "is in no shard"
            _fail(
                f"{index_name} places it here, but it {where}",
                file=shard_name,
                tensor=name,
                remedy="download the index and this shard again",
            )
    for name, shard_name in stored.items():
        if name not in weight_map:
            _fail(
                f"is in the shard but not in {index_name}",
                file=shard_name,
                tensor=name,
                remedy="download the index and this shard again",
            )


def _catalogue(shards: tuple[Shard, ...]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in tensors:
                _fail(
                    f"is also in {tensors[tensor.name].path.name}",
                    file=shard.name,
                    tensor=tensor.name,
                    remedy="one of the two shards belongs to another checkpoint; move it away",
                )
            tensors[tensor.name] = tensor
    return tensors
