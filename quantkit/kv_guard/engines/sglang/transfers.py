"""Disaggregated serving: tags travel beside the pages, as two more buffers of the transfer.

A transfer writes to the decode server's memory whenever it comes; the guard's own events wait for the next forward.
Were tags sent to where tags lie, a page's grant could overwrite the tag that had already come with its content. So the
decode server has an inbox for each page. What lies there is taken when the transfer is said to be complete, and is
compared (`PageTagTracker.arrive`). What comes to a page that a step reads, and that expects no transfer, is put over
the page's own tag ahead of the check behind that step, which then fails: a late write is seen before the step's tokens
are sent.
"""

import importlib
from collections.abc import Callable
from typing import Any

from quantkit.kv_guard.engines.sglang.allocation import AllocationHooks
from quantkit.kv_guard.engines.sglang.guard import Guard
from quantkit.kv_guard.engines.sglang.inbox import buffers_of
from quantkit.kv_guard.engines.sglang.targets import ROOT


class TransferHooks:
    """Of both sides; which one this is says the server's option."""

    def __init__(self, guard: Guard, slots: AllocationHooks) -> None:
        self._guard = guard
        self._slots = slots

    def buffers(self, result: Any, kv_pool: Any) -> Any:
        """AFTER get_contiguous_buf_infos: pointers, bytes, and bytes a page, of each buffer that is sent."""
        if not self._guard.is_sent(kv_pool):
            return None
        pool = self._guard.pool
        tags = pool.tracker.tags
        arrays = (tags.seals_P, tags.records_P3) if pool.inbox is None else pool.inbox.arrays
        self._guard.has_given_pointers = True
        return tuple([*theirs, *ours] for theirs, ours in zip(result, buffers_of(arrays), strict=True))

    def reserve(self, original: Callable[..., Any], queue: Any, req: Any, *given: Any, **named: Any) -> Any:
        """AROUND _pre_alloc: pages for a prompt that another server computes, behind what the cache has of it."""
        if not self._guard.guards_rows(queue.req_to_token_pool):
            return original(queue, req, *given, **named)
        return self._slots.reserve(lambda: original(queue, req, *given, **named), req)

    def committed(self, _: object, queue: Any, decode_req: Any) -> None:
        """AFTER _commit_transfer_to_req: the transfer is said to be complete."""
        req = decode_req.req
        if not self._guard.guards_rows(queue.tree_cache.req_to_token_pool) or req.finished() or not req.kv.holds_kv:
            return
        if importlib.import_module(ROOT + "disaggregation.utils")._is_fake_transfer(req):
            return  # a warm-up, for which nothing is sent
        pool = self._guard.pool
        first, last = req.prefix_len // pool.page_size, -(-req.kv.kv_allocated_len // pool.page_size)
        slots = pool.row_pool.req_to_token[req.kv.req_pool_idx, first * pool.page_size : last * pool.page_size]
        pool.arrive(req.kv.req_pool_idx, first, slots[:: pool.page_size].clone())
