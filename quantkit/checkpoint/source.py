"""A checkpoint directory as a catalogue: config, index and every shard header, compared with each other.

Nothing outside the directory is read, except through the links of a hub cache (a snapshot is made of links into
``blobs/``). No tensor data is read here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from quantkit.checkpoint.file_names import CONFIG_NAME, HF_QUANT_CONFIG_NAME, INDEX_NAME
from quantkit.checkpoint.header import StoredTensor, read_header
from quantkit.checkpoint.json_files import read_json
from quantkit.checkpoint.links import Boundary
from quantkit.checkpoint.shard_index import ShardIndex, check_shard_names, collect_tensors, read_index
from quantkit.checkpoint.sidecars import Sidecars, find_sidecars
from quantkit.errors import SourceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One safetensors file; ``tensors`` in file order. ``stamp`` differs where the file is another than it was."""

    name: str
    path: Path
    file_bytes: int
    tensors: tuple[StoredTensor, ...]
    stamp: str = ""


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
    shards, index = _read_shards(directory, boundary)
    hf_quant_config = directory / HF_QUANT_CONFIG_NAME
    return Checkpoint(
        directory=directory,
        config=config,
        quantization=declared_quantization(config, hf_quant_config if hf_quant_config.is_file() else None),
        shards=shards,
        tensors=collect_tensors({shard.name: shard.tensors for shard in shards}, index),
        sidecars=find_sidecars(directory, boundary),
    )


def stamp_of(path: Path) -> str:
    """Length, time of the content, time of any change: who puts the former back cannot put back the latter."""
    status = path.stat()
    return f"{status.st_size} bytes, {status.st_mtime_ns}, {status.st_ctime_ns}"


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


def declared_quantization(config: Mapping[str, Any], hf_quant_config: Path | None) -> Mapping[str, Any]:
    """The quantization of the config, or that of ModelOpt's own file where the checkpoint has one and they agree."""
    _, section = quantization_section(config)
    if hf_quant_config is None:
        return section
    document = read_json(hf_quant_config, what="it declares the quantization")
    inner = document.get("quantization")
    if not isinstance(inner, dict):
        raise SourceError("has no quantization section", file=HF_QUANT_CONFIG_NAME, remedy="download it again")
    declared = {"quant_method": "modelopt", **inner}
    if section and str(section.get("quant_algo", inner.get("quant_algo"))) != str(inner.get("quant_algo")):
        _fail("contradicts config.json", file=HF_QUANT_CONFIG_NAME, remedy="keep the one that belongs to the shards")
    if section and not str(section.get("quant_method", "modelopt")).startswith("modelopt"):
        _fail("stands beside another quantization", file=HF_QUANT_CONFIG_NAME, remedy="keep the one that is true")
    return section or declared


def source_stamps(checkpoint: Checkpoint) -> dict[str, str]:
    """What every shard is known by: a run that was interrupted goes on with these, and with no others."""
    return {shard.name: shard.stamp for shard in checkpoint.shards}


def choose_index(names: Iterable[str], directory: Path) -> str | None:
    """Which of the names in a directory is the index of its shards, if one is."""
    found = sorted(name for name in names if name.endswith(".safetensors.index.json"))
    if INDEX_NAME in found:
        return INDEX_NAME
    if len(found) > 1:
        _fail(f"holds several indexes ({', '.join(found)})", file=directory, remedy="keep the one that belongs to it")
    return found[0] if found else None


def _fail(message: str, *, file: str | Path, remedy: str) -> NoReturn:
    raise SourceError(message, file=file, remedy=remedy)


def _check_link(path: Path, boundary: Boundary) -> None:
    if not boundary.holds(path):
        _fail(
            "is a link that leaves the checkpoint",
            file=path.name,
            remedy="name the directory that it points to: nothing outside the source is read",
        )


def _read_shards(directory: Path, boundary: Boundary) -> tuple[tuple[Shard, ...], ShardIndex | None]:
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        _fail(f"cannot be listed ({error.strerror})", file=directory, remedy="check its permissions")
    index = None
    if (index_name := choose_index([path.name for path in paths], directory)) is not None:
        _check_link(directory / index_name, boundary)
        index = read_index(directory / index_name)
    present = {path.name: path for path in paths if path.name.endswith(".safetensors")}
    check_shard_names(present, index, directory)
    shards = []
    for name, path in present.items():
        if not path.is_file():
            _fail("is not a file (a broken link?)", file=name, remedy="download this shard again")
        _check_link(path, boundary)
        header = read_header(path)
        stamp = stamp_of(path)
        shards.append(Shard(name=name, path=path, file_bytes=header.file_bytes, tensors=header.tensors, stamp=stamp))
    return tuple(shards), index
