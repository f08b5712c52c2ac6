"""Which shards belong to a checkpoint and which tensors to a shard: the index, the names, and what the headers say."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.json_files import MOST_INDEX_BYTES, read_json
from quantkit.errors import SourceError

_SHARD_OF_MANY = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """``weight_map`` says which shard holds a tensor; ``name`` is the file that says so."""

    name: str
    weight_map: Mapping[str, str]


def read_index(path: Path) -> ShardIndex:
    """The index in a file. Raises SourceError where it has none."""
    weight_map = read_json(path, what="download it again", most_bytes=MOST_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        _fail("has no weight_map of strings", file=path.name, remedy="download the index again")
    return ShardIndex(name=path.name, weight_map=weight_map)


def check_shard_names(present: Collection[str], index: ShardIndex | None, directory: Path) -> None:
    """That the shards ``present`` in a directory are those of its index or, without one, of their own numbering."""
    if index is not None:
        _check_named(set(index.weight_map.values()), present, index.name)
    for name in present:
        if name != name.encode(errors="replace").decode():
            _fail("has a name that is no text", file=ascii(name), remedy="rename it, or download it again")
    if not present:
        _fail("holds no .safetensors file", file=directory, remedy="only safetensors are read, never pickles")
    if index is None:
        _check_numbering(present)


def collect_tensors(
    shards: Mapping[str, Iterable[StoredTensor]], index: ShardIndex | None
) -> Mapping[str, StoredTensor]:
    """Every tensor of the shards by name. Raises SourceError where one stands twice, or not where the index says."""
    if index is not None:
        _check_places(index, shards)
    tensors: dict[str, StoredTensor] = {}
    for shard_name, stored in shards.items():
        for tensor in stored:
            if tensors.setdefault(tensor.name, tensor) is not tensor:
                _fail(
                    f"is also in {tensors[tensor.name].path.name}",
                    file=shard_name,
                    tensor=tensor.name,
                    remedy="one of the two shards belongs to another checkpoint; move it away",
                )
    return tensors


def _fail(message: str, *, file: str | Path, remedy: str, tensor: str | None = None) -> NoReturn:
    raise SourceError(message, file=file, remedy=remedy, tensor=tensor)


def _check_named(named: set[str], present: Collection[str], index_name: str) -> None:
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


def _check_numbering(present: Collection[str]) -> None:
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


def _check_places(index: ShardIndex, shards: Mapping[str, Iterable[StoredTensor]]) -> None:
    stored = {tensor.name: shard_name for shard_name, tensors in shards.items() for tensor in tensors}
    if stored == index.weight_map:
        return
    for name, shard_name in index.weight_map.items():
        if stored.get(name) != shard_name:
            where = f"is in {stored[name]}" if name in stored else "is in no shard"
            _fail(
                f"{index.name} places it here, but it {where}",
                file=shard_name,
                tensor=name,
                remedy="download the index and this shard again",
            )
    for name, shard_name in stored.items():
        if name not in index.weight_map:
            _fail(
                f"is in the shard but not in {index.name}",
                file=shard_name,
                tensor=name,
                remedy="download the index and this shard again",
            )
