"""Where vLLM's two model runners keep what a step reads; V2 is the default, V1 takes over what it cannot do."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from quantkit.kv_guard.engines.settings import PluginSettings
from quantkit.kv_guard.engines.vllm.settings import groups_of, num_rows, rank_of
from quantkit.kv_guard.engines.vllm.targets import SUPPORTED
from quantkit.kv_guard.engines.vllm.trackers import Widths
from quantkit.kv_guard.engines.vllm.worker import Batch, WorkerGuard
from quantkit.kv_guard.tracker import KvGuardError

_RANK = ("rank", "world_size", "data_parallel_index")
COMMON = ("vllm_config", "kv_cache_config", "device", "max_num_tokens", *(f"parallel_config.{one}" for one in _RANK))
ONLY_V1 = ("input_batch.block_table", "seq_lens", "optimistic_seq_lens_cpu", "query_start_loc", "positions")
ONLY_V2 = ("block_tables.block_tables", "req_states")


def guard_of_v1(runner: Any, settings: PluginSettings) -> WorkerGuard:
    """For a runner whose pool was made."""
    _check(runner, COMMON + ONLY_V1)
    return _guard(runner, settings, lambda group: runner.input_batch.block_table[group].max_num_blocks_per_req)


def guard_of_v2(runner: Any, settings: PluginSettings) -> WorkerGuard:
    """For a runner whose pool was made."""
    _check(runner, COMMON + ONLY_V2)
    return _guard(runner, settings, lambda group: runner.block_tables.block_tables[group].gpu.shape[1])


def batch_of_v1(runner: Any) -> Batch:
    """Behind `_prepare_inputs`, which copied the page tables."""
    requests = list(runner.input_batch.req_ids)
    count = len(requests)
    starts = runner.query_start_loc.gpu[: count + 1]
    num_tokens = int(runner.query_start_loc.np[count])
    tables = [runner.input_batch.block_table[group] for group in _groups(runner)]
    return Batch(
        requests=requests,
        tables=[table.block_table.gpu[:count] for table in tables],
        slots=[table.slot_mapping.gpu[:num_tokens] for table in tables],
        lengths=runner.seq_lens[:count],
        starts=starts,
        positions=runner.positions[:num_tokens],
        most_tokens=int(runner.optimistic_seq_lens_cpu[:count].max()),
    )


def batch_of_v2(input_batch: Any, tables: Sequence[Tensor], slots: Tensor) -> Batch:
    """What `prepare_attn` returned: the tables that attention reads, and a row of slots for each group."""
    count, num_tokens = input_batch.num_reqs, input_batch.num_tokens
    return Batch(
        requests=list(input_batch.req_ids),
        tables=[table[:count] for table in tables],
        slots=[slots[group, :num_tokens] for group in range(len(tables))],
        lengths=input_batch.seq_lens[:count],
        starts=input_batch.query_start_loc[: count + 1],
        positions=input_batch.positions[:num_tokens],
        most_tokens=int(input_batch.seq_lens_cpu_upper_bound[:count].max()),
    )


def _guard(runner: Any, settings: PluginSettings, width_of: Callable[[int], int]) -> WorkerGuard:
    groups = groups_of(runner.vllm_config, runner.kv_cache_config, settings.model)
    widths = Widths(
        num_pages=runner.kv_cache_config.num_blocks,
        num_rows=num_rows(runner.vllm_config),
        most_pages=[width_of(group) for group in range(len(groups))],
        most_tokens=runner.max_num_tokens,
    )
    return WorkerGuard(groups, widths, settings, runner.device, rank=rank_of(runner.parallel_config))


def _groups(runner: Any) -> range:
    return range(len(runner.kv_cache_config.kv_cache_groups))


def _check(runner: Any, names: Sequence[str]) -> None:
    """Attributes that only an instance has."""
    for name in names:
        holder = runner
        for part in name.split("."):
            if not hasattr(holder, part):
                raise KvGuardError(
                    f"{type(runner).__module__}.{type(runner).__name__} has no {name}",
                    remedy=SUPPORTED.remedy,
                )
            holder = getattr(holder, part)
