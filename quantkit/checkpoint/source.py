"""A checkpoint directory as a catalogue: config, index and every shard header, compared with each other.

Nothing outside the directory is read, except through the links of a hub cache (a snapshot is made of links into
``blobs/``). No tensor data is read here.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from quantkit.checkpoint.header import StoredTensor, read_header
from quantkit.checkpoint.sidecars import Sidecars, find_sidecars
from quantkit.errors import SourceError

INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
HF_QUANT_CONFIG_NAME = "hf_quant_config.json"  # where ModelOpt declares its quantization
_SHARD_OF_MANY = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors")
_MAX_JSON_BYTES = 1 << 30


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

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(tensor.spec.num_bytes for tensor in self.tensors.values())


def open_checkpoint(directory: Path) -> Checkpoint:
    """Catalogue of a checkpoint directory. Raises SourceError for everything that does not fit together."""
    if not directory.is_dir():
        raise SourceError("is not a directory", file=directory, remedy="name a checkpoint directory")
    config = read_json(directory / CONFIG_NAME, what="a checkpoint needs its config.json")
    shards = _read_shards(directory)
    return Checkpoint(
        directory=directory,
        config=config,
        quantization=_quantization(directory, config),
        shards=shards,
        tensors=_catalogue(shards),
        sidecars=find_sidecars(directory),
    )


def read_json(path: Path, *, what: str) -> dict[str, Any]:
    """A JSON object from a file of the source; ``what`` says why it is needed."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise SourceError("is too large to be JSON", file=path.name, remedy="download it again")
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise SourceError("is missing", file=path.name, remedy=what) from error
    except OSError as error:
        raise SourceError(f"cannot be read ({error.strerror})", file=path.name, remedy=what) from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"is not JSON ({error})", file=path.name, remedy="download it again") from error
    if not isinstance(document, dict):
        raise SourceError("is not a JSON object", file=path.name, remedy="download it again")
    return document


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
    if section or not (directory / HF_QUANT_CONFIG_NAME).is_file():
        return section
    document = read_json(directory / HF_QUANT_CONFIG_NAME, what="it declares the quantization")
    inner = document.get("quantization")
    if not isinstance(inner, dict):
        raise SourceError("has no quantization section", file=HF_QUANT_CONFIG_NAME, remedy="download it again")
    return {"quant_method": "modelopt", **inner}


def _fail(message: str, *, file: str | Path, remedy: str, tensor: str | None = None) -> NoReturn:
    raise SourceError(message, file=file, remedy=remedy, tensor=tensor)


def _read_shards(directory: Path) -> tuple[Shard, ...]:
    present = {path.name: path for path in sorted(directory.iterdir()) if path.name.endswith(".safetensors")}
    index_path = _index_path(directory)
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
    for name in present:
        match = _SHARD_OF_MANY.fullmatch(name)
        if match is None:
            continue
        count, width = int(match["count"]), len(match["number"])
        for number in range(1, min(count, 100_000) + 1):
            other = f"{match['stem']}-{number:0{width}d}-of-{match['count']}.safetensors"
            if other not in present:
                _fail(f"the shard is missing ({name} is there)", file=other, remedy="download this shard")
        break


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
