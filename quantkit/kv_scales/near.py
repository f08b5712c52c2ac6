"""The few kilobytes of a hub repository that are read here: gains of norms, and scales that are there already."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from quantkit.checkpoint.disk import named_errors
from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.hub import Repository, read_range
from quantkit.checkpoint.source import Checkpoint
from quantkit.engines.kv_scales import SCALE_LEAVES
from quantkit.errors import SourceError
from quantkit.families.family import Family, Role
from quantkit.threads import FETCHERS

_NUM_CONNECTIONS = 8
_MOST_BYTES = 1 << 20  # of a norm


def with_small_tensors(checkpoint: Checkpoint, repository: Repository, family: Family, directory: Path) -> Checkpoint:
    """A catalogue of headers whose norms and KV scales have been fetched into ``directory``; the rest stays unread."""
    wanted = [tensor for tensor in checkpoint.tensors.values() if _is_wanted(tensor, family)]

    def fetch(numbered: tuple[int, StoredTensor]) -> StoredTensor:
        number, tensor = numbered
        content = read_range(repository, tensor.path.name, tensor.begin, tensor.end).content
        if len(content) != tensor.spec.num_bytes:
            raise SourceError("ends early", tensor=tensor.name, file=tensor.path.name, remedy="run the command again")
        path = directory / str(number)
        with named_errors(path):
            path.write_bytes(content)
        return StoredTensor(tensor.name, tensor.spec, path, 0)

    with ThreadPoolExecutor(_NUM_CONNECTIONS, thread_name_prefix=FETCHERS) as pool:
        fetched = {tensor.name: tensor for tensor in pool.map(fetch, enumerate(wanted))}
    return replace(checkpoint, tensors={**checkpoint.tensors, **fetched})


def _is_wanted(tensor: StoredTensor, family: Family) -> bool:
    is_small = tensor.spec.num_bytes <= _MOST_BYTES
    return is_small and (tensor.name.endswith(SCALE_LEAVES) or family.role_of(tensor.name) is Role.NORM)
