"""What the guard makes of vLLM's own configuration; refuses what it cannot guard."""

from dataclasses import dataclass
from typing import Any

from quantkit.kv_guard.engines.settings import VARIABLE
from quantkit.kv_guard.identity import PoolIdentity
from quantkit.kv_guard.tracker import KvGuardError

SPARE_ROWS = 32  # of sessions that wait for input, beside what runs
_PAGED = {"FullAttentionSpec", "MLAAttentionSpec"}
_WINDOWED = {"SlidingWindowSpec"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of layers with one page table. ``reach``: how many tokens before a step's first its attention reads;
    None: all. vLLM may keep more (`num_retained_tokens`), but has no page in front of the window where its prefix cache
    was hit.
    """

    page_size: int
    identity: PoolIdentity
    reach: int | None = None


def rank_of(parallel_config: Any) -> int:
    """Of a worker among all of a server's, the replicas of data parallelism counted."""
    return int(parallel_config.data_parallel_index * parallel_config.world_size + parallel_config.rank)


def num_rows(vllm_config: Any) -> int:
    """Requests that may be in work at once; scheduler and workers must agree."""
    return int(vllm_config.scheduler_config.max_num_seqs) + SPARE_ROWS


def groups_of(vllm_config: Any, kv_cache_config: Any, model: str | None = None) -> list[Group]:
    """``model``: its fingerprint, None for its name. Raises KvGuardError for what would be missed or misjudged."""
    _check_parallel(vllm_config.parallel_config)
    if kv_cache_config.hisparse_host_num_blocks is not None:
        raise _unsupported("HiSparse, whose pages are read after they were released")
    if getattr(vllm_config.model_config, "is_diffusion", False):
        raise _unsupported("a diffusion model, which writes its canvas again and again")
    if not kv_cache_config.kv_cache_groups:
        raise _unsupported("a model without a KV cache")
    config = vllm_config.model_config
    fingerprint = model or f"{config.model}@{config.revision or ''}"
    return [
        _group(fingerprint, number, group.kv_cache_spec) for number, group in enumerate(kv_cache_config.kv_cache_groups)
    ]


def _check_parallel(parallel: Any) -> None:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise _unsupported(f"{name} {getattr(parallel, name)}: a page then holds tokens of several places")
    if parallel.distributed_executor_backend == "external_launcher":
        raise _unsupported("external_launcher, where every rank schedules alone")
    if getattr(parallel, "enable_elastic_ep", False):
        raise _unsupported("elastic expert parallelism, which runs steps that no scheduler made")


def _group(model: str, number: int, spec: Any) -> Group:
    members = list(getattr(spec, "kv_cache_specs", {"": spec}).values())  # UniformTypeKVCacheSpecs holds one a layer
    kinds = {type(member).__name__ for member in members}
    if not kinds <= _PAGED and not (kinds <= _WINDOWED and len(members) > 0):
        raise _unsupported(f"KV cache group {number} of {', '.join(sorted(kinds))}")
    layout = f"{'+'.join(sorted(kinds))} {getattr(members[0], 'dtype', '')}, pages of {spec.block_size}"
    return Group(
        page_size=spec.block_size,
        identity=PoolIdentity(model=model, layout=layout, pool=f"group{number}"),
        reach=None if kinds <= _PAGED else members[0].sliding_window - 1,
    )


def _unsupported(what: str) -> KvGuardError:
    return KvGuardError(f"not guarded: {what}", remedy=f"leave {VARIABLE} out, or serve without it")
