"""Hooks of slots and rows: who is handed what, who gives it back.

The allocators say which slots, and not whose they are; the functions above them (`alloc_for_extend` and its like) know
the requests, and lay slots out in a stated order. So an allocator's answer is noted while such a function runs, and is
laid out as it does. Slots that are handed out to anybody else would be pages of which the guard knows nothing: it
refuses.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from quantkit.kv_guard.engines.sglang.guard import Guard
from quantkit.kv_guard.engines.sglang.pool import NewPages
from quantkit.kv_guard.engines.sglang.supported import REPORT
from quantkit.kv_guard.tracker import KvGuardError


class AllocationHooks:
    """Methods are hooks; their first arguments are what SGLang's registry gives for their kind."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._handed: list[Tensor] | None = None

    def handed_out(self, slots: Tensor | None, allocator: Any, *_: object, **__: object) -> None:
        """AFTER an allocator's alloc, alloc_extend, alloc_decode; None is a pool that is full."""
        if slots is None or not self._guard.guards(allocator):
            return
        if self._handed is not None:
            self._handed.append(slots)
        else:
            what = f"{len(slots)} slots were handed out by a path that the guard does not know"
            self._guard.refusals.refuse(KvGuardError(what, remedy=REPORT))

    def release_pages(self, allocator: Any, *page_ids: Tensor) -> Any:
        """BEFORE _release_page_ids, where all ways of freeing pages end."""
        if not self._guard.guards(allocator):
            return None
        kept = tuple(self._without_lost(pages) for pages in page_ids)
        for pages in kept:
            self._guard.pool.release(pages.long())
        return (allocator, *kept), {}

    def free_slots(self, allocator: Any, free_index: Tensor) -> Any:
        """BEFORE the free of single slots; a group is freed when it ends, by another call of this."""
        if not self._guard.guards(allocator) or allocator.free_group is not None:
            return None
        slots = self._without_lost(free_index)
        self._guard.pool.release(slots.long().clone())
        return (allocator, slots), {}

    def cleared(self, _: object, allocator: Any) -> None:
        """AFTER clear."""
        if self._guard.guards(allocator):
            self._guard.pool.clear()

    def alloc_rows(self, original: Callable[..., Any], row_pool: Any, reqs: Sequence[Any]) -> Any:
        """AROUND alloc: a request that holds a row keeps it."""
        if not self._guard.guards_rows(row_pool):
            return original(row_pool, reqs)
        begin = [req for req in reqs if not req.kv.holds_kv]
        result = original(row_pool, reqs)
        if result is not None:
            for req in begin:
                if req.kv.retraction_backup is None:  # else its pages are filled with what it had
                    self._guard.condemned.let_go(req.rid)  # of an earlier request, or before it was retracted
                self._guard.pool.open(req.kv.req_pool_idx, req)
        return result

    def free_rows(self, row_pool: Any, indices: Sequence[int]) -> None:
        """BEFORE free_rows."""
        if self._guard.guards_rows(row_pool):
            for row in indices:
                self._guard.pool.close(row)

    def free_row(self, row_pool: Any, req: Any) -> None:
        """BEFORE free, of a pool that has no free_rows."""
        self.free_rows(row_pool, [req.kv.req_pool_idx])

    def clear_rows(self, _: object, row_pool: Any) -> None:
        """AFTER clear."""
        if self._guard.guards_rows(row_pool):
            for row in list(self._guard.pool.prefixes):
                self._guard.pool.close(row)

    def extend(self, original: Callable[..., Any], batch: Any) -> Any:
        """AROUND alloc_for_extend: tokens [prefix, prefix + extend) of each request, one request behind the other."""
        if not self._guard.guards_rows(batch.req_to_token_pool):
            return original(batch)
        begin = [not req.kv.holds_kv for req in batch.reqs]

        def grant(handed: Sequence[Tensor]) -> None:
            pages, start = NewPages(), 0
            for req, begins, prefix, extend in zip(
                batch.reqs, begin, batch.prefix_lens, batch.extend_lens, strict=True
            ):
                if begins:
                    self._share(req, prefix)
                self._lay_out(pages, req, (prefix, prefix + extend), start, req.full_untruncated_fill_ids)
                start += extend
            self._guard.pool.grant(_one(handed), pages)

        return self._noted(lambda: original(batch), grant)

    def reserve(self, original: Callable[[], Any], req: Any, *, awaits: bool) -> Any:
        """Around _pre_alloc: the cached part, if any, and pages that ``awaits`` a transfer, or that nothing fills."""

        def grant(handed: Sequence[Tensor]) -> None:
            pages = NewPages()
            if req.prefix_len:
                self._share(req, req.prefix_len)
            span = (req.prefix_len, req.kv.kv_allocated_len)
            self._lay_out(pages, req, span, 0, req.full_untruncated_fill_ids)
            self._guard.pool.grant(_one(handed), pages, awaits=awaits)

        return self._noted(original, grant)

    def decode(self, original: Callable[..., Any], batch: Any, token_per_req: int) -> Any:
        """AROUND alloc_for_decode: a token for each request, at the place of its length."""
        if not self._guard.guards_rows(batch.req_to_token_pool):
            return original(batch, token_per_req)
        lengths = batch.seq_lens_cpu.tolist()

        def grant(handed: Sequence[Tensor]) -> None:
            pages = NewPages()
            for place, (req, length) in enumerate(zip(batch.reqs, lengths, strict=True)):
                self._lay_out(pages, req, (length, length + token_per_req), place * token_per_req)
            self._guard.pool.grant(_one(handed), pages)

        return self._noted(lambda: original(batch, token_per_req), grant)

    def speculate(self, original: Callable[..., Any], tree_cache: Any, req_to_token_pool: Any, **named: Any) -> Any:
        """AROUND alloc_for_spec_decode: tokens [now, next) of each request, one request behind the other."""
        if not self._guard.guards_rows(req_to_token_pool):
            return original(tree_cache, req_to_token_pool, **named)

        def grant(handed: Sequence[Tensor]) -> None:
            pages, start = NewPages(), 0
            spans = zip(named["cur_kv_lens_cpu"].tolist(), named["nxt_kv_lens_cpu"].tolist(), strict=True)
            for req, (now, then) in zip(named["reqs"], spans, strict=True):
                self._lay_out(pages, req, (now, then), start)
                start += then - now
            if handed:
                self._guard.pool.grant(_one(handed), pages)

        return self._noted(lambda: original(tree_cache, req_to_token_pool, **named), grant)

    def _without_lost(self, pages: Tensor) -> Tensor:
        """Behind a row that was mended, what is freed names page 0 for pages that it had lost."""
        return pages[pages != 0] if self._guard.has_lost_pages else pages

    def _noted(self, original: Callable[[], Any], grant: Callable[[Sequence[Tensor]], None]) -> Any:
        """What ``original`` returns; ``grant`` gets what was handed out meanwhile, unless the guard went off."""
        if self._handed is not None:
            self._guard.refusals.refuse(KvGuardError("an allocation began within another", remedy=REPORT))
            return original()
        handed: list[Tensor] = []
        self._handed = handed
        try:
            result = original()
        finally:
            self._handed = None
        if self._guard.is_on:
            with self._guard.refusals.refusing():
                grant(handed)
        return result

    def _share(self, req: Any, prefix: int) -> None:
        """A request begins with what the cache has of it."""
        pool = self._guard.pool
        row, num_pages = req.kv.req_pool_idx, prefix // pool.page_size
        keys = pool.prefixes[row].keys(req.full_untruncated_fill_ids, 0, num_pages, in_pairs=bool(self._guard.in_pairs))
        pool.share(row, 0, keys)

    def _lay_out(
        self, pages: NewPages, req: Any, span: tuple[int, int], start: int, tokens: Sequence[int] = ()
    ) -> None:
        """Pages that begin in ``span``, whose first slot was handed out at ``start``."""
        pool, row = self._guard.pool, req.kv.req_pool_idx
        begin, end = span
        first, last = -(-begin // pool.page_size), -(-end // pool.page_size)
        if first < last:
            places = [start + index * pool.page_size - begin for index in range(first, last)]
            pages.add(row, first, places, pool.prefixes[row].owners(tokens, first, last))


def _one(handed: Sequence[Tensor]) -> Tensor:
    if len(handed) != 1:
        raise KvGuardError(f"{len(handed)} allocations where one was expected", remedy=REPORT)
    return handed[0]
