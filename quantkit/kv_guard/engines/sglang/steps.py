"""Hooks of a step: events and checks around the forward, the verdict ahead of the tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.kv_guard.engines.sglang.aborts import Aborts
from quantkit.kv_guard.engines.sglang.guard import Guard
from quantkit.kv_guard.tracker import Step

_STEPS = "quantkit_kv_steps"  # attribute of a result: the numbers of the steps that it came from


class StepHooks:
    """A forward of the model under a scheduled batch is a step; others (a draft's, a warm-up's) are none.

    SGLang pads a batch within the forward, for a graph or for other ranks: here it has the rows of its requests and no
    others, of which there are never more than the table has.
    """

    def __init__(self, guard: Guard, aborts: Aborts) -> None:
        self._guard = guard
        self._aborts = aborts
        self._batch: Any = None
        self._steps: list[int] = []

    def run_batch(self, original: Callable[..., Any], scheduler: Any, batch: Any, *others: Any, **named: Any) -> Any:
        """AROUND run_batch: results are processed a step later, where the scheduler overlaps them."""
        self._guard.verify()  # which may end the guard
        if not self._guard.guards_rows(batch.req_to_token_pool):
            return original(scheduler, batch, *others, **named)
        self._guard.has_lost_pages = False
        self._batch, self._steps = batch, []
        try:
            result = original(scheduler, batch, *others, **named)
        finally:
            self._batch = None
        if self._steps:
            setattr(result, _STEPS, self._steps)
        return result

    def forward(self, original: Callable[..., Any], runner: Any, forward_batch: Any, *others: Any, **named: Any) -> Any:
        """AROUND forward, on the stream that runs it."""
        if self._batch is None or not self._guard.runs(runner):
            return original(runner, forward_batch, *others, **named)
        pool = self._guard.pool
        is_step = bool(self._batch.reqs) and not forward_batch.forward_mode.is_idle()
        with self._guard.refusals.refusing():
            pool.carry_out()
            if is_step:
                step, writes = self._step(forward_batch), _writes(forward_batch)
                self._steps.append(self._guard.logbook.before_step(step))
                pool.readers.step = self._steps[-1]
                pool.tracker.check_writes(*writes)
                if pool.inbox is not None:
                    pool.inbox.launch()
        result = original(runner, forward_batch, *others, **named)
        if is_step and self._guard.is_on:
            if pool.inbox is not None:
                pool.inbox.take_late(pool.tracker, step.rows, writes[0])
            pool.tracker.after_step()
        return result

    def process_batch_result(self, scheduler: Any, batch: Any, result: Any) -> None:
        """BEFORE process_batch_result. Raises KvGuardError in mode halt, which ends the server."""
        if not self._guard.guards_rows(batch.req_to_token_pool):
            return
        with self._guard.refusals.refusing():
            self._judge(scheduler, batch, getattr(result, _STEPS, ()))

    def _judge(self, scheduler: Any, batch: Any, steps: Sequence[int]) -> None:
        for step in steps:
            self._aborts.judge(self._guard.logbook.verdict(step), batch)
        if steps:
            self._aborts.end(scheduler, batch)

    def _step(self, forward_batch: Any) -> Step:
        """All pages that may be read: those of the tokens before, of the step's own, and of speculated ones."""
        longest = max(req.kv.kv_allocated_len for req in self._batch.reqs)
        pool = self._guard.pool
        return Step(
            table=pool.row_pool.req_to_token,
            rows=forward_batch.req_pool_indices.long(),
            lengths=forward_batch.seq_lens.long() + _num_speculated(forward_batch),
            most_pages=-(-longest // pool.page_size),
            by_token=True,
        )


def _num_speculated(forward_batch: Any) -> int:
    """Tokens of each request behind its length, which a verifying step stores and reads."""
    if not forward_batch.forward_mode.is_target_verify():
        return 0
    return len(forward_batch.out_cache_loc) // int(forward_batch.batch_size)


def _writes(forward_batch: Any) -> Sequence[Tensor]:
    """Slots, rows and places of the tokens that a step stores. A tree of drafts lies by place, not by position."""
    rows, lengths = forward_batch.req_pool_indices.long(), forward_batch.seq_lens.long()
    slots = forward_batch.out_cache_loc.long()
    mode = forward_batch.forward_mode
    if mode.is_decode():
        return slots, rows, lengths - 1
    if mode.is_target_verify():
        ahead = torch.arange(_num_speculated(forward_batch), device=slots.device)
        places = (lengths[:, None] + ahead).reshape(-1)
        return slots, rows.repeat_interleave(len(ahead), output_size=len(slots)), places
    return slots, rows.repeat_interleave(forward_batch.extend_seq_lens, output_size=len(slots)), forward_batch.positions
