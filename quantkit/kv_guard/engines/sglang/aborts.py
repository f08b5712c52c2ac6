"""How a request is ended by name, before the tokens of its step are released.

SGLang 0.5.23 has a way for forwards that ran on KV which never landed: a request with `discard_output_reason` is
finished without the token of its prefill. For decode steps it has one for tokens that must not be committed
(`_handle_sampling_mask_abort`); it is taken here ahead of the loop over the batch, which passes finished requests over
where steps overlap, and is told so for this one batch where they do not.

A request that is ended gives its pages back through its row, which is what was found wrong. So the row is mended first:
places whose page is another's get the request's own page, where the pool still has it, and else page 0, which nobody
has and which is left out of what is freed. Nothing of such a request enters the cache.
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import torch

from quantkit.kv_guard.engines.sglang.events import wait_for
from quantkit.kv_guard.engines.sglang.guard import Guard
from quantkit.kv_guard.engines.sglang.targets import ROOT
from quantkit.kv_guard.tracker import Mode, Verdict

_REASON = "A page of the KV cache was not what this request was granted; its output was withheld."


class Aborts:
    """Condemns requests, ends them and mends their rows. Methods but `judge` and `end` are hooks."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def judge(self, verdict: Verdict, batch: Any) -> None:
        """Condemn whom the verdict ends, and whoever has read what they computed since; where a token is stored for a
        row that is nobody's, the batch.

        The tracker takes that for padding, of which there is none yet where a batch is checked here (steps.py): it is a
        request's of the batch, and nobody can say whose.
        """
        if self._guard.settings.mode is not Mode.ABORT:
            return
        wrong = set(verdict.aborted)
        if any(one.request is None and one.check == "write" for one in verdict.violations):
            wrong.update(req.rid for req in batch.reqs)
        if wrong:
            wrong |= self._guard.pool.withdraw(wrong, verdict.step)
        self._guard.condemned.add(wrong)

    def end(self, scheduler: Any, batch: Any) -> None:
        """Mark the batch's condemned requests; ranks that share a batch mark the same."""
        if self._guard.settings.mode is not Mode.ABORT:
            return
        flags = agreed([req.rid in self._guard.condemned for req in batch.reqs], self._guard.group)
        for req, is_condemned in zip(batch.reqs, flags, strict=True):
            if is_condemned and not req.finished() and not req.is_retracted:
                self._guard.condemned.add([req.rid])
                abort = importlib.import_module(ROOT + "managers.schedule_batch").FINISH_ABORT
                req.discard_output_reason = abort(_REASON, HTTPStatus.INTERNAL_SERVER_ERROR)
                if req.inflight_middle_chunks > 0 and scheduler.chunked_req is req:
                    scheduler._pending_chunked_abort_req = req  # its next chunk never runs

    def decode(self, original: Callable[..., Any], processor: Any, batch: Any, result: Any) -> Any:
        """AROUND process_batch_result_decode."""
        ended = [req for req in batch.reqs if self._ends_now(req)]
        if not ended:
            return original(processor, batch, result)
        processor.token_to_kv_pool_allocator.free_group_begin()
        for req in ended:
            req.to_finish = req.discard_output_reason
            req.update_finish_state(0)
            processor._handle_sampling_mask_abort(req)
        processor.token_to_kv_pool_allocator.free_group_end()
        return original(dataclasses.replace(processor, enable_overlap=True), batch, result)

    def release(self, original: Callable[..., Any], req: Any, tree_cache: Any, *, checkpoint: bool) -> Any:
        """AROUND release_kv_cache."""
        is_ours = self._guard.guards_rows(tree_cache.req_to_token_pool) and req.kv.holds_kv
        if not is_ours or req.rid not in self._guard.condemned:
            return original(req, tree_cache, checkpoint=checkpoint)
        self._mend(req)
        result = original(req, tree_cache, checkpoint=False)
        if req.kv.retraction_backup is None:  # else it comes back with what it has read
            self._guard.condemned.let_go(req.rid)
        return result

    def _ends_now(self, req: Any) -> bool:
        if req.rid not in self._guard.condemned or req.finished() or req.is_retracted:
            return False
        return req.discard_output_reason is not None

    def _mend(self, req: Any) -> None:
        """Let a row name what is its own. Waits for the device, as it happens once for a request that is ended."""
        pool = self._guard.pool
        table, row, page_size = pool.row_pool.req_to_token, req.kv.req_pool_idx, pool.page_size
        first, last = req.kv.cache_protected_len // page_size, -(-req.kv.kv_allocated_len // page_size)
        if first >= last:
            return
        wait_for(table)
        own = pool.tracker.own_pages(row, first, last - first)
        slots = own.clamp(min=0)[:, None] * page_size + torch.arange(page_size, device=table.device)
        places = slots.reshape(-1)[: table.shape[1] - first * page_size]
        table[row, first * page_size : first * page_size + len(places)] = places.to(table.dtype)
        self._guard.has_lost_pages |= bool((own < 0).any())


def agreed(flags: Sequence[bool], group: Any) -> list[bool]:
    """Of each request, whether any rank of the group says so; None is a group of one."""
    if group is None or torch.distributed.get_world_size(group) == 1 or not flags:
        return list(flags)
    said = torch.tensor(flags, dtype=torch.int32)
    torch.distributed.all_reduce(said, op=torch.distributed.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in said.tolist()]
