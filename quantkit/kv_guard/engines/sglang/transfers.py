"""Disaggregated serving: tags travel beside the pages, as two more buffers of the transfer.

A transfer writes to the decode server's memory whenever it comes; the guard's own events wait for the next forward.
Were tags sent to where tags lie, a page's grant could overwrite the tag that had already come with its content. So the
decode server has an inbox for each page. What lies there is taken when the transfer is said to be complete, and is
compared (`PageTagTracker.arrive`). What comes to a page that a step reads, and that expects no transfer, is put over
the page's own tag ahead of the check behind that step, which then fails: a late write is seen before the step's tokens
are sent.

**Tags are sent once**, behind the layers' buffers. A second tag behind the content would say that content came late
whose first tag came in time; but of one list nothing is known to land last. Mooncake hands all entries of a chunk to
its engine as one batch (`batch_transfer_sync`), or one thread a layer, and NIXL as one list of descriptors: engines cut
them up and spread them over queues and adapters, which promise no order among one another. Nor would tags in front be
safe: both backends tell the other server the size of the first entry as that of a page.

**A page is announced** when it is reserved (but for a warm-up), so that nobody reads it before its transfer is said to
be complete, and nobody is given it after a release that came too early, wherever content and tags are by then. SGLang
0.5.23 gives the pages of a failed transfer back in `_release_request` alone, and these are the ways that lead there:

| a transfer | is over, as SGLang knows it |
|---|---|
| was complete, and what came beside the pages was another's | by the success of all ranks that sent |
| failed, or was aborted, or timed out | when each rank that was told of the pages has acknowledged the abort |
| failed before a server was told of the pages | at once: there is nobody who could write |
| the same, and a rank has not acknowledged within 30 seconds | never: the pages are given back all the same |
| the same, and SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE is 0 | never: they are given back at once |
| was never sent: a retraction comes back from the host, a warm-up | the pages are filled, or are not announced |

The two that say never are violations of kind 1, in every mode. Whoever has such a page next is named. Who has it after
him is guarded by tags alone: nobody will ever say that it is over, as where the other server is gone, and a pool whose
pages nobody may have any more would be the end of this server.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from quantkit.kv_guard.engines.sglang.allocation import AllocationHooks
from quantkit.kv_guard.engines.sglang.events import wait_for
from quantkit.kv_guard.engines.sglang.guard import Guard
from quantkit.kv_guard.engines.sglang.inbox import buffers_of
from quantkit.kv_guard.engines.sglang.targets import ROOT
from quantkit.kv_guard.tracker import KvGuardError

_log = logging.getLogger(__name__)


class TransferHooks:
    """Of both sides; which one this is says the server's option."""

    def __init__(self, guard: Guard, allocation: AllocationHooks) -> None:
        self._guard = guard
        self._allocation = allocation

    def buffers(self, result: Any, kv_pool: Any) -> Any:
        """AFTER get_contiguous_buf_infos: pointers, bytes, and bytes a page, of each buffer that is sent."""
        if not self._guard.is_sent(kv_pool):
            return None
        pool = self._guard.pool
        tags = pool.tracker.tags
        arrays = (tags.seals_P, tags.records_P3) if pool.inbox is None else pool.inbox.arrays
        self._guard.has_given_pointers = True
        return tuple([*theirs, *ours] for theirs, ours in zip(result, buffers_of(arrays), strict=True))

    def paired(self, _: object, ours: Sequence[int], theirs: Sequence[int], state_type: object = None) -> None:
        """BEFORE get_mla_kv_ptrs_with_pp, where buffers of two servers are paired by their order.

        Raises KvGuardError in every mode where one has more than the other: tags would be written over its pages.
        """
        if self._guard.has_given_pointers and state_type is None and len(ours) != len(theirs):
            raise KvGuardError(
                f"a transfer of {len(ours)} buffers, two of them tags, to a server that has {len(theirs)}",
                remedy="run the guard on the prefill and on the decode servers, or on none",
            )

    def reserve(self, original: Callable[..., Any], queue: Any, req: Any, *given: Any, **named: Any) -> Any:
        """AROUND _pre_alloc: pages for a prompt that another server computes, behind what the cache has of it."""
        if not self._guard.guards_rows(queue.req_to_token_pool):
            return original(queue, req, *given, **named)
        return self._allocation.reserve(lambda: original(queue, req, *given, **named), req, awaits=not _is_fake(req))

    def committed(self, _: object, queue: Any, decode_req: Any) -> None:
        """AFTER _commit_transfer_to_req: the transfer is said to be complete."""
        req = decode_req.req
        if not self._awaits(queue, req):
            return
        first, slots = self._awaiting_slots(req)
        if req.finished():  # what came beside the pages was another request's; it gives back pages that nobody reads
            self._guard.pool.drained(req.kv.req_pool_idx, slots)
        else:
            self._guard.pool.arrive(req.kv.req_pool_idx, first, slots)

    def given_up(self, queue: Any, decode_req: Any) -> None:
        """BEFORE _release_request: the pages of a transfer that has failed, or was complete, are about to be free."""
        req, receiver = decode_req.req, decode_req.kv_receiver
        if not self._awaits(queue, req) or receiver is None:  # which a transfer that was complete has no more
            return
        if _is_over(receiver, req.bootstrap_room):
            self._guard.pool.drained(req.kv.req_pool_idx, self._awaiting_slots(req)[1])
        else:
            what = "KV guard: the pages of request %s are given back while its transfer may still write there"
            _log.error(what, req.rid)

    def backed_up(self, req: Any, tree_cache: Any, *_: object) -> None:
        """BEFORE backup_kv_cache, which waits for the device: what a row names comes back as the request's own."""
        if not self._guard.guards_rows(tree_cache.req_to_token_pool):
            return
        pool = self._guard.pool
        wait_for(pool.row_pool.req_to_token)  # no step runs, so that events can be carried out
        pool.carry_out()
        if pool.holds(req.kv.req_pool_idx, self._backed_up_slots(req)):
            return
        _log.error("KV guard: request %s was retracted with a page that is not its own", req.rid)
        self._guard.condemned.add([req.rid])

    def restored(self, _: object, req: Any, tree_cache: Any, *__: object) -> None:
        """AFTER restore_kv_cache: pages that were reserved as for a transfer, and expect none."""
        if self._guard.guards_rows(tree_cache.req_to_token_pool):
            self._guard.pool.fill(req.kv.req_pool_idx, self._backed_up_slots(req))

    def _awaits(self, queue: Any, req: Any) -> bool:
        """Whether a request has pages here that were announced to another server."""
        return self._guard.guards_rows(queue.tree_cache.req_to_token_pool) and req.kv.holds_kv and not _is_fake(req)

    def _awaiting_slots(self, req: Any) -> tuple[int, Tensor]:
        """The first page behind what the cache had, and the first slot of each from there on."""
        pool = self._guard.pool
        first, last = req.prefix_len // pool.page_size, -(-req.kv.kv_allocated_len // pool.page_size)
        slots = pool.row_pool.req_to_token[req.kv.req_pool_idx, first * pool.page_size : last * pool.page_size]
        return first, slots[:: pool.page_size].clone()

    def _backed_up_slots(self, req: Any) -> Tensor:
        """The first of each page: all tokens but the last, whose turn it is."""
        pool = self._guard.pool
        slots: Tensor = pool.row_pool.req_to_token[req.kv.req_pool_idx, : req.seqlen - 1 : pool.page_size]
        return slots.clone()


def _is_fake(req: Any) -> bool:
    """A warm-up, for which nothing is sent."""
    return bool(importlib.import_module(ROOT + "disaggregation.utils")._is_fake_transfer(req))


def _is_over(receiver: Any, room: int) -> bool:
    """Whether SGLang knows that nothing of a transfer that failed is on its way to this server.

    It does where no server was told of the pages; and where each that was has said since that it writes there no more.
    """
    told = getattr(receiver, "bootstrap_infos", None)
    return told is None or bool(receiver.kv_mgr.is_abort_release_safe(room, len(told)))
