"""The scheduler's side in vLLM: a `Shadow` sees what the pool does, and goes along with each step; reports come back.

A request whose pages were not its own is ended before `update_from_output` looks at its tokens, as requests are whose
KV could not be loaded: FINISHED_ERROR, an error to its client. What it wrote from its first bad page on goes out of the
prefix cache, and whoever has such a page is ended with it: those pages are whose they should be, and what is in them
was computed from what was not. What is bad is a grant and not a page: where steps overlap, a page may be another's by
the time that the report of a step is read.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quantkit.kv_guard.engines.refusals import Refusals
from quantkit.kv_guard.engines.settings import PluginSettings
from quantkit.kv_guard.engines.vllm import targets
from quantkit.kv_guard.engines.vllm.events import EVENTS, StepEvents, StepReport
from quantkit.kv_guard.engines.vllm.settings import groups_of, num_rows
from quantkit.kv_guard.engines.vllm.shadow import Shadow
from quantkit.kv_guard.engines.vllm.wrapping import original_of
from quantkit.kv_guard.identity import Chains
from quantkit.kv_guard.tracker import KvGuardError

GUARD = "quantkit_kv_guard"  # the attribute of a scheduler, its manager and its pool
ERROR_CODE = "kv_cache_integrity"
_LOG = logging.getLogger("vllm.quantkit_kv_guard")


class SchedulerGuard:
    """Of one scheduler. ``found`` are the engine's own things by the names of targets.py."""

    def __init__(self, scheduler: Any, settings: PluginSettings, found: dict[str, Any]) -> None:
        manager = scheduler.kv_cache_manager
        self.refusals = Refusals(settings.mode, _LOG)
        self._found = found
        self._scheduler = scheduler
        self._manager = manager
        self._sides = manager.coordinator.single_type_managers
        self._hash_size = manager.block_pool.hash_block_size
        groups = groups_of(scheduler.vllm_config, scheduler.kv_cache_config, settings.model)
        _check_fresh(scheduler)
        self.shadow = Shadow(
            chains=[Chains(group.identity.key(settings.secret_bytes)) for group in groups],
            num_rows=num_rows(scheduler.vllm_config),
            # a transfer may leave the last token of a cached page to be computed again
            marks_cached=scheduler.connector is None,
        )
        for holder in (scheduler, manager, manager.block_pool):
            setattr(holder, GUARD, self)

    def allocated(self, request: Any) -> None:
        """A request has more pages, of its own or of the cache."""
        name = request.request_id
        for group, side in enumerate(self._sides):
            blocks = side.req_to_blocks.get(name) or ()
            known = self.shadow.num_pages(name, group)
            if len(blocks) > known:
                pages = (None if block.is_null else block.block_id for block in blocks[known:])
                self.shadow.extend(name, group, pages, self._hash_of(request, side.block_size))

    def cached(self, request: Any, blocks: Sequence[Any], part: range, group: int, mask: Sequence[bool] | None) -> None:
        """Logical pages ``part`` of a request can be found by others; not those that ``mask`` leaves out."""
        self.allocated(request)  # pages are cached within `allocate_slots`, right after they were handed out
        hash_of = self._hash_of(request, self._sides[group].block_size)
        for place, index in enumerate(part):
            engine_hash = None if blocks[index].is_null or (mask is not None and not mask[place]) else hash_of(index)
            if engine_hash is not None:
                self.shadow.cache(request.request_id, group, index, blocks[index].block_id, engine_hash)

    def freed(self, blocks: Sequence[Any], counts: Counter[int], *, is_caching: bool) -> None:
        """``counts``: how many had each page before ``blocks`` were given up, one by one."""
        for block in blocks:
            counts[block.block_id] -= 1
            if counts[block.block_id] == 0:
                self.shadow.give_up(block.block_id, is_cached=is_caching and block.block_hash is not None)
            elif counts[block.block_id] < 0:
                self.shadow.give_up_again(block.block_id)

    def events(self, scheduled: Iterable[str]) -> StepEvents | None:
        """For the workers, with a step of these requests; None where the guard goes off."""
        with self.refusals.refusing():
            return self.shadow.take(scheduled)
        return None

    def end(self, scheduler_output: Any, model_output: Any) -> list[Any]:
        """End whom the report of a step names, and whoever reads what they wrote; returns their requests."""
        events, report = getattr(scheduler_output, EVENTS, None), getattr(model_output, EVENTS, None)
        if events is None:
            return []
        if report is None and scheduler_output.total_num_scheduled_tokens > 0:
            text = "a worker returned a step that it did not check: the guard is off or not loaded there"
            remedy = "install quantkit, and set the same environment, on every node"
            self.refusals.refuse(KvGuardError(text, remedy=remedy))
        ended = [] if report is None or not report.ended else self._end(report)
        self.shadow.settle(events.number)
        return ended

    def tell(self, outputs: dict[int, Any], ended: Iterable[Any]) -> dict[int, Any]:
        """Add an error for each request to what goes to its client."""
        by_client = defaultdict(list)
        for request in ended:
            by_client[request.client_index].append(self._error_of(request))
        for client, errors in by_client.items():
            if client in outputs:
                outputs[client].outputs = [*outputs[client].outputs, *errors]
            else:
                outputs[client] = self._found[targets.ENGINE_OUTPUTS.name](outputs=errors)
        return outputs

    def _end(self, report: StepReport) -> list[Any]:
        sizes = [side.block_size for side in self._sides]
        bad = {grant for one in report.bad_grants if (grant := self.shadow.granted_as(one)) is not None}
        for one in report.first_bad:
            bad |= self.shadow.written(one.request, one.index * sizes[one.group], sizes)
        names = dict.fromkeys(report.ended)
        before = -1
        while before != len(names):  # what they wrote behind a bad page is bad in turn
            before = len(names)
            for name in self.shadow.holdings:
                first = self.shadow.first_token(name, bad, sizes)
                if first is not None:
                    names[name] = None
                    bad |= self.shadow.written(name, first, sizes)
        self._manager.evict_blocks({grant.page for grant in bad})
        _LOG.error("ending %d requests: %s", len(names), ", ".join(names))
        ended: list[Any] = self._scheduler.finish_requests(list(names), self._found[targets.REQUEST_STATUS.name])
        return ended

    def _error_of(self, request: Any) -> Any:
        message = "a page of this request's KV cache was not its own; nothing that was computed from it is returned"
        return self._found[targets.ENGINE_OUTPUT.name](
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            events=request.take_events(),
            trace_headers=request.trace_headers,
            error=self._found[targets.REQUEST_ERROR.name](code=ERROR_CODE, message=message, retryable=True),
        )

    def _hash_of(self, request: Any, page_size: int) -> Callable[[int], bytes | None]:
        """Of the group's pages: hashes may be of shorter stretches, and say everything up to their end."""
        hashes, ratio = request.block_hashes, page_size // self._hash_size

        def hash_of(index: int) -> bytes | None:
            last = (index + 1) * ratio - 1
            return bytes(hashes[last]) if 0 <= last < len(hashes) and page_size % self._hash_size == 0 else None

        return hash_of


def _check_fresh(scheduler: Any) -> None:
    """Raise KvGuardError where a guard would have missed what came before it, or what a subclass does instead."""
    pool = scheduler.kv_cache_manager.block_pool
    if hasattr(pool, GUARD):
        raise KvGuardError("this pool has a guard already", remedy="attach it once")
    if pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:  # but for the null block
        raise KvGuardError("pages of this pool are in use already", remedy="attach the guard when the pool is made")
    for name in ("schedule", "update_from_output"):
        if original_of(getattr(type(scheduler), name)) is None:
            raise KvGuardError(
                f"{type(scheduler).__name__} has its own {name}, which the guard does not see",
                remedy="serve with vLLM's own scheduler, or without the guard",
            )
