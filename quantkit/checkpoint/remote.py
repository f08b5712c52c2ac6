"""A hub repository as a catalogue, from its config, index and shard headers: no weight is downloaded.

What is compared with what is spelled once, in ``source.py``, ``shard_index.py`` and ``header.py``, for both this and a
directory.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.file_names import CONFIG_NAME, HF_QUANT_CONFIG_NAME
from quantkit.checkpoint.header import header_end, parse_header
from quantkit.checkpoint.hub import Repository, download_file, find_repository, read_range
from quantkit.checkpoint.json_files import MOST_BYTES, MOST_INDEX_BYTES, read_json
from quantkit.checkpoint.shard_index import ShardIndex, check_shard_names, collect_tensors, read_index
from quantkit.checkpoint.sidecars import choose_sidecars
from quantkit.checkpoint.source import Checkpoint, Shard, choose_index, declared_quantization
from quantkit.errors import SourceError

_NUM_CONNECTIONS = 8
_ENTRY_BYTES = 112  # of a header for one tensor, beside its name: a published entry takes about 85
_LEAST_ASKED, _MOST_ASKED = 1 << 16, 1 << 20  # bytes of a shard in the first request; a second follows where it must


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCheckpoint:
    """A catalogue whose tensors cannot be read: its directory and paths are names, and nothing is there."""

    checkpoint: Checkpoint
    repository: Repository


def open_remote(hub_id: str, revision: str) -> RemoteCheckpoint:
    """Catalogue of a repository at the commit that ``revision`` stands for now, compared like that of a directory."""
    repository = find_repository(hub_id, revision)
    directory = Path(f"{hub_id}@{repository.commit}")
    top_level = sorted({name.partition("/")[0] for name in repository.files})
    with _errors_of(repository, directory):
        index_name = choose_index(top_level, directory)
    documents = _download_documents(repository, directory, index_name)
    shard_names = [name for name in top_level if name.endswith(".safetensors")]
    with _errors_of(repository, directory):
        config = read_json(documents[CONFIG_NAME], what="a checkpoint needs its config.json")
        quantization = declared_quantization(config, documents.get(HF_QUANT_CONFIG_NAME))
        index = None if index_name is None else read_index(documents[index_name])
        check_shard_names(shard_names, index, directory)
    shards = _read_shards(repository, directory, shard_names, index)
    with _errors_of(repository, directory):
        tensors = collect_tensors({shard.name: shard.tensors for shard in shards}, index)
    checkpoint = Checkpoint(
        directory=directory,
        config=config,
        quantization=quantization,
        shards=shards,
        tensors=tensors,
        sidecars=choose_sidecars({name: one.num_bytes for name, one in repository.files.items()}, directory),
    )
    return RemoteCheckpoint(checkpoint=checkpoint, repository=repository)


@contextmanager
def _errors_of(repository: Repository, directory: Path) -> Iterator[None]:
    """Errors about files of a checkpoint, as errors about those of the repository: there is no file to repair here."""
    try:
        yield
    except SourceError as error:
        is_about_all = error.file is None or error.file == str(directory)
        raise SourceError(
            error.message,
            tensor=error.tensor,
            file=str(repository) if is_about_all else f"{repository}: {error.file}",
            remedy="the hub holds it like this; name another revision, or a directory with a checkpoint that is whole",
        ) from error


def _download_documents(repository: Repository, directory: Path, index_name: str | None) -> dict[str, Path]:
    names = [CONFIG_NAME]
    if HF_QUANT_CONFIG_NAME in repository.files:
        names.append(HF_QUANT_CONFIG_NAME)
    if index_name is not None:
        names.append(index_name)
    with _errors_of(repository, directory):
        for name in names:
            if name not in repository.files:
                raise SourceError("is missing", file=name)
            if (repository.files[name].num_bytes or 0) > (MOST_INDEX_BYTES if name == index_name else MOST_BYTES):
                raise SourceError("is too large to be JSON", file=name)
    return {name: download_file(repository, name) for name in names}


def _read_shards(
    repository: Repository, directory: Path, names: list[str], index: ShardIndex | None
) -> tuple[Shard, ...]:
    """In the order of the names; of several errors, that of the first name."""
    expected: Counter[str] = Counter()
    for tensor_name, shard_name in ({} if index is None else index.weight_map).items():
        expected[shard_name] += len(tensor_name) + _ENTRY_BYTES

    def read(name: str) -> Shard:
        num_asked = _MOST_ASKED if index is None else min(max(expected[name], _LEAST_ASKED), _MOST_ASKED)
        return _read_shard(repository, directory / name, num_asked)

    with ThreadPoolExecutor(_NUM_CONNECTIONS, thread_name_prefix="quantkit-hub") as pool:
        return tuple(pool.map(read, names))


def _read_shard(repository: Repository, path: Path, num_asked: int) -> Shard:
    with _errors_of(repository, path.parent):
        if path.name not in repository.files:
            raise SourceError("is a folder, not a file", file=path.name)
    first = read_range(repository, path.name, 0, num_asked)
    content, file_bytes = first.content, first.file_bytes
    with _errors_of(repository, path.parent):
        end = header_end(content, path, file_bytes)
    if end > len(content):
        content += read_range(repository, path.name, len(content), end).content
    with _errors_of(repository, path.parent):
        header = parse_header(content, path, file_bytes)
    # a commit does not change; where the hub says a hash it is compared with what arrives
    stamp = repository.files[path.name].sha256 or f"{repository.commit}/{path.name}"
    return Shard(name=path.name, path=path, file_bytes=file_bytes, tensors=header.tensors, stamp=stamp)
