"""Hooks of the prefix cache: which pages it takes, and which of its own a request reads instead of what it had."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantkit.kv_guard.engines.sglang.guard import Guard
from quantkit.kv_guard.engines.sglang.supported import REPORT
from quantkit.kv_guard.tracker import KvGuardError


@dataclass(frozen=True, slots=True)
class _Insertion:
    """Tokens that went in, their slots, and how many of them were there before."""

    tokens: Any
    slots: Tensor
    num_there: int
    length: int  # of the whole pages


class CachingHooks:
    """A request's checkpoint inserts its pages; the tree takes those that it has none for, and the request gives the
    others back and reads the tree's."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._insertions: list[_Insertion] | None = None

    def checkpoint(self, original: Callable[..., Any], tree: Any, req: Any, **named: Any) -> Any:
        """AROUND checkpoint_into_tree."""
        if not self._guard.guards_rows(tree.req_to_token_pool):
            return original(tree, req, **named)
        if self._insertions is not None:
            self._guard.refusals.refuse(KvGuardError("a checkpoint began within another", remedy=REPORT))
            return original(tree, req, **named)
        self._insertions = []
        protected = req.kv.cache_protected_len
        try:
            result = original(tree, req, **named)
            if self._insertions and self._guard.is_on:
                # the second one, where there is one, splits what the first put there
                with self._guard.refusals.refusing():
                    self._taken(req, protected, self._insertions[0])
        finally:
            self._insertions = None
        return result

    def insert(self, result: Any, tree: Any, params: Any) -> None:
        """AFTER insert."""
        if not self._guard.guards_rows(tree.req_to_token_pool) or tree.disable:
            return
        if self._insertions is None:
            what = "pages entered the cache by a path that the guard does not know"
            self._guard.refusals.refuse(KvGuardError(what, remedy=REPORT))
            return
        page_size = self._guard.pool.page_size
        length = len(params.key) // page_size * page_size
        self._insertions.append(_Insertion(params.key.token_ids, params.value, result.prefix_len, length))

    def _taken(self, req: Any, protected: int, insertion: _Insertion) -> None:
        """``protected`` tokens were the tree's before."""
        pool, row = self._guard.pool, req.kv.req_pool_idx
        prefixes = pool.prefixes[row]
        theirs, first, last = (
            length // pool.page_size for length in (protected, insertion.num_there, insertion.length)
        )
        in_pairs = bool(self._guard.in_pairs)
        pool.share(row, theirs, prefixes.keys(insertion.tokens, theirs, first, in_pairs=in_pairs))
        pool.take(row, first, insertion.slots, prefixes.keys(insertion.tokens, first, last, in_pairs=in_pairs))
