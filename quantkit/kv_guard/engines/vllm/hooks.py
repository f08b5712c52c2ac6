"""The wrappers themselves. A method of an object without a guard does what it did, at the cost of one look-up."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from quantkit.kv_guard.engines.refusals import Refusals
from quantkit.kv_guard.engines.settings import PluginSettings
from quantkit.kv_guard.engines.targets import check_targets
from quantkit.kv_guard.engines.vllm import runners, targets
from quantkit.kv_guard.engines.vllm.events import EVENTS
from quantkit.kv_guard.engines.vllm.gather import gathering
from quantkit.kv_guard.engines.vllm.reports import GuardedOutput
from quantkit.kv_guard.engines.vllm.scheduler import GUARD, SchedulerGuard
from quantkit.kv_guard.engines.vllm.worker import WorkerGuard
from quantkit.kv_guard.engines.vllm.wrapping import wrap
from quantkit.kv_guard.tracker import KvGuardError

Function = Callable[..., Any]
_LOG = logging.getLogger("vllm.quantkit_kv_guard")


def hook_scheduler(settings: PluginSettings) -> None:
    """Check all targets of an engine core, then wrap them."""
    found = check_targets(targets.SCHEDULER_SIDE, targets.SUPPORTED)

    def attach(_: Any, scheduler: Any, *__: Any, **___: Any) -> None:
        _attach(settings, scheduler, lambda: SchedulerGuard(scheduler, settings, found))

    for target, wrapper in (
        (targets.INIT_SCHEDULER, _behind(attach)),
        (targets.SCHEDULE, _guarded(_schedule)),
        (targets.UPDATE_FROM_OUTPUT, _guarded(_update_from_output)),
        (targets.ALLOCATE_SLOTS, _guarded(_allocate_slots)),
        (targets.FREE_REQUEST, _guarded(_leave)),
        (targets.POP_BLOCKS, _guarded(_leave)),
        (targets.GET_NEW_BLOCKS, _guarded(_get_new_blocks)),
        (targets.TOUCH, _guarded(_touch)),
        (targets.FREE_BLOCKS, _guarded(_free_blocks)),
        (targets.CACHE_FULL_BLOCKS, _guarded(_cache_full_blocks)),
        (targets.COLLECTIVE_RPC, gathering),
    ):
        wrap(target.name, wrapper)


def hook_worker(settings: PluginSettings) -> None:
    """Check all targets of a worker, then wrap them."""
    found = check_targets(targets.WORKER_SIDE, targets.SUPPORTED)
    found[targets.ASYNC_OUTPUT.name](GuardedOutput)

    def attach(guard_of: Callable[[Any, PluginSettings], WorkerGuard]) -> Function:
        def attached(_: Any, runner: Any, kv_cache_config: Any, is_profiling: bool = False, **__: Any) -> None:
            if not is_profiling:
                _attach(settings, runner, lambda: setattr(runner, GUARD, guard_of(runner, settings)))

        return _behind(attached)

    for target, wrapper in (
        (targets.INIT_CACHE_V1, attach(runners.guard_of_v1)),
        (targets.INIT_CACHE_V2, attach(runners.guard_of_v2)),
        (targets.PREPARE_V1, _guarded(_prepare_v1)),
        (targets.PREPARE_V2, _guarded(_prepare_v2)),
        (targets.EXECUTE_V1, _guarded(_execute_model)),
        (targets.EXECUTE_V2, _guarded(_execute_model)),
        (targets.SAMPLE_V1, _guarded(_sample)),
        (targets.SAMPLE_V2, _guarded(_sample)),
        (targets.POOL_V2, _guarded(_sample)),
        (targets.WARM_UP, _behind(_warmed_up)),
    ):
        wrap(target.name, wrapper)


def before(act: Callable[[], None]) -> Callable[[Function], Function]:
    """Of a door: what has to be done before somebody goes through it."""

    def wrapper_of(original: Function) -> Function:
        def door(*args: Any, **kwargs: Any) -> Any:
            act()
            return original(*args, **kwargs)

        return door

    return wrapper_of


def _behind(act: Function) -> Callable[[Function], Function]:
    """``act`` gets the result and what the method was called with."""

    def wrapper_of(original: Function) -> Function:
        def method(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            act(result, *args, **kwargs)
            return result

        return method

    return wrapper_of


def _guarded(around: Function) -> Callable[[Function], Function]:
    """``around`` gets guard, original, object and arguments; of one that has none, or that is off, it is not asked."""

    def wrapper_of(original: Function) -> Function:
        def method(owner: Any, *args: Any, **kwargs: Any) -> Any:
            guard = getattr(owner, GUARD, None)
            if guard is None or guard.refusals.is_off:
                return original(owner, *args, **kwargs)
            return around(guard, original, owner, *args, **kwargs)

        return method

    return wrapper_of


def _attach(settings: PluginSettings, owner: Any, make: Callable[[], Any]) -> None:
    guard = getattr(owner, GUARD, None)
    refusals = Refusals(settings.mode, _LOG) if guard is None else guard.refusals
    with refusals.refusing():
        if guard is not None:
            raise KvGuardError("a guard is attached already", remedy="attach it once")
        make()


def _schedule(guard: SchedulerGuard, original: Function, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(scheduler, *args, **kwargs)
    setattr(output, EVENTS, guard.events(output.num_scheduled_tokens))
    return output


def _update_from_output(
    guard: SchedulerGuard, original: Function, scheduler: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    ended = guard.end(scheduler_output, model_runner_output)
    return guard.tell(original(scheduler, scheduler_output, model_runner_output), ended)


def _allocate_slots(
    guard: SchedulerGuard, original: Function, manager: Any, request: Any, *args: Any, **kw: Any
) -> Any:
    new_blocks = original(manager, request, *args, **kw)
    guard.allocated(request)
    return new_blocks


def _leave(guard: SchedulerGuard, original: Function, manager: Any, request: Any) -> Any:
    result = original(manager, request)
    guard.shadow.leave(request.request_id)
    return result


def _get_new_blocks(guard: SchedulerGuard, original: Function, pool: Any, num_blocks: int) -> Any:
    blocks = original(pool, num_blocks)
    guard.shadow.hand_out(block.block_id for block in blocks)
    return blocks


def _touch(guard: SchedulerGuard, original: Function, pool: Any, blocks: Any) -> None:
    original(pool, blocks)
    for block in blocks:
        if not block.is_null:
            guard.shadow.take_up(block.block_id)


def _free_blocks(guard: SchedulerGuard, original: Function, pool: Any, ordered_blocks: Any) -> None:
    blocks = list(ordered_blocks)
    ours = [block for block in blocks if not block.is_null and (block.pool is None or block.pool is pool)]
    counts = Counter({block.block_id: block.ref_cnt for block in ours})
    original(pool, blocks)
    guard.freed(ours, counts, is_caching=pool.enable_caching)


def _cache_full_blocks(
    guard: SchedulerGuard, original: Function, pool: Any, request: Any, *args: Any, **kw: Any
) -> None:
    names = ("blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id", "block_mask")
    given = dict(zip(names, args, strict=False)) | kw
    original(pool, request, *args, **kw)
    part = range(given["num_cached_blocks"], given["num_full_blocks"])
    guard.cached(request, given["blocks"], part, given["kv_cache_group_id"], given.get("block_mask"))


def _prepare_v1(guard: WorkerGuard, original: Function, runner: Any, *args: Any, **kwargs: Any) -> Any:
    prepared = original(runner, *args, **kwargs)
    if guard.is_told:
        guard.launch(runners.batch_of_v1(runner))
    return prepared


def _prepare_v2(guard: WorkerGuard, original: Function, runner: Any, input_batch: Any) -> Any:
    tables, slots = original(runner, input_batch)
    if guard.is_told:
        guard.launch(runners.batch_of_v2(input_batch, tables, slots))
    return tables, slots


def _execute_model(
    guard: WorkerGuard, original: Function, runner: Any, scheduler_output: Any, *args: Any, **kw: Any
) -> Any:
    if kw.get("dummy_run"):
        return original(runner, scheduler_output, *args, **kw)
    guard.begin(scheduler_output)
    output = original(runner, scheduler_output, *args, **kw)
    guard.finish()
    is_result = hasattr(output, "get_output") or hasattr(output, "req_id_to_index")
    return (
        guard.guarded(output) if is_result else output
    )  # None and what goes to the next stage: `sample_tokens` ends it


def _sample(guard: WorkerGuard, original: Function, runner: Any, *args: Any) -> Any:
    return guard.guarded(original(runner, *args))


def _warmed_up(_: Any, worker: Any) -> None:
    guard = getattr(worker.model_runner, GUARD, None)
    if guard is not None:
        guard.end_warm_up()
