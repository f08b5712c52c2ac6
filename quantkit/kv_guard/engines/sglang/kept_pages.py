"""What each cached page was when the prefix cache took it: a `Held` for every page of the tree, found by its prefix.

The tree of SGLang 0.5.23 is one of two implementations behind an interface (Rust where it is built, else Python), and
its nodes are numbers to everybody else: nothing can be hung on a node, nor split with it. But of one prefix a tree has
one page at a time. So what a node would keep is kept by the digest of the prefix that ends with the page, and needs no
part in splitting or merging nodes.

Entries lie in arrays on the device; which prefix has which entry is known on the host. An entry ends when its page is
released, which only the device can tell: it marks the entry, the marks are copied now and then, and the host reads the
copy when it is there.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.kv_guard.engines.sglang.supported import REPORT
from quantkit.kv_guard.tracker import Held, KvGuardError

_STEPS_BETWEEN_COPIES = 16


@dataclass(frozen=True, slots=True)
class _Copy:
    """Marks as they were behind ``tick``; ``ready`` is the event of the copy, None where it is done."""

    marks_E: Tensor
    tick: int
    ready: Any


class KeptPages:
    """Twice as many entries as the pool has pages: one for each, and as many that have ended without being read yet."""

    BYTES_A_PAGE = 2 * 25 + 8  # two entries, and which is the page's

    def __init__(self, num_pages: int, device: torch.device) -> None:
        self._num_entries = 2 * num_pages
        shape = self._num_entries + 1  # the last entry takes what no page is kept for
        self._held_3E = torch.zeros(3, shape, dtype=torch.int64, device=device)
        self._has_ended_E = torch.zeros(shape, dtype=torch.bool, device=device)
        self._entry_of_P = torch.full((num_pages,), self._num_entries, dtype=torch.int64, device=device)
        self.clear()

    def clear(self) -> None:
        """On the host; pages are told to `forget` on the device."""
        self._entry_of: dict[bytes, int] = {}
        self._prefix_of: dict[int, bytes] = {}
        self._free = deque(range(self._num_entries))
        self._since_E = np.full(self._num_entries, -1, dtype=np.int64)
        self._tick = 0
        self._copy: _Copy | None = None

    def __len__(self) -> int:
        return len(self._prefix_of)

    def add(self, prefixes: Sequence[bytes]) -> list[int]:
        """Entries on the host for pages that the tree takes; `put` fills them.

        Raises KvGuardError for more than the pool has."""
        if len(self._free) < len(prefixes):
            self._wait_for_marks()
        if len(self._free) < len(prefixes):
            raise KvGuardError("the cache took more pages than the pool has", remedy=REPORT)
        entries = [self._free.popleft() for _ in prefixes]
        for entry, prefix in zip(entries, prefixes, strict=True):
            self._entry_of[prefix] = entry
            self._prefix_of[entry] = prefix
        self._since_E[entries] = self._tick
        return entries

    def find(self, prefixes: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """Places of those prefixes that are kept, and their entries. For what else a tree hits nothing vouches."""
        found = [(place, self._entry_of[prefix]) for place, prefix in enumerate(prefixes) if prefix in self._entry_of]
        return [place for place, _ in found], [entry for _, entry in found]

    def withdraw(self, entries: Iterable[int]) -> None:
        """On the host: nothing vouches any more for pages that the tree has."""
        for entry in entries:
            prefix = self._prefix_of.get(entry)
            if prefix is not None and self._entry_of.get(prefix) == entry:
                del self._entry_of[prefix]

    def put(self, entries: Tensor, pages: Tensor, held: Held) -> None:
        """On the device: what the pages of new entries are."""
        self._has_ended_E.index_fill_(0, self._entry_of_P[pages], True)  # in case that a page was taken twice
        self._held_3E[:, entries] = torch.stack((held.generations, held.owners, held.indices))
        self._entry_of_P.index_put_((pages,), entries)
        self._has_ended_E.index_fill_(0, entries, False)

    def get(self, entries: Tensor) -> Held:
        """On the device: what was put."""
        generations, owners, indices = self._held_3E[:, entries]
        return Held(generations=generations, owners=owners, indices=indices)

    def forget(self, pages: Tensor) -> None:
        """On the device: pages were released, whether or not they were kept."""
        entries = self._entry_of_P[pages]
        self._has_ended_E.index_fill_(0, entries, True)
        self._entry_of_P.index_fill_(0, pages, self._num_entries)

    def forget_all(self) -> None:
        """On the device."""
        self._has_ended_E.fill_(True)
        self._entry_of_P.fill_(self._num_entries)

    def step(self) -> None:
        """Behind the events of a step: read a copy of the marks that has come, or ask for one."""
        self._tick += 1
        if self._copy is None:
            if self._tick % _STEPS_BETWEEN_COPIES == 0:
                self._copy = self._ask()
        elif self._copy.ready is None or self._copy.ready.query():
            self._read_marks(self._copy)

    def _wait_for_marks(self) -> None:
        """Of the device, as nothing else here does: as many pages as the pool has came and went in few steps."""
        if self._copy is not None and self._copy.ready is not None:
            self._copy.ready.synchronize()
            self._read_marks(self._copy)
        if self._has_ended_E.is_cuda:
            torch.cuda.synchronize(self._has_ended_E.device)
        self._read_marks(self._ask())

    def _ask(self) -> _Copy:
        marks = self._has_ended_E[: self._num_entries]
        if not marks.is_cuda:
            return _Copy(marks.clone(), self._tick, None)
        host = torch.empty(marks.shape, dtype=torch.bool, pin_memory=True).copy_(marks, non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return _Copy(host, self._tick, ready)

    def _read_marks(self, copy: _Copy) -> None:
        """Free what ended. What was added behind the copy is not judged by it."""
        self._copy = None
        has_ended = copy.marks_E.numpy() & (self._since_E >= 0) & (self._since_E < copy.tick)
        for entry in np.flatnonzero(has_ended).tolist():
            prefix = self._prefix_of.pop(entry)
            if self._entry_of.get(prefix) == entry:
                del self._entry_of[prefix]
            self._since_E[entry] = -1
            self._free.append(entry)
