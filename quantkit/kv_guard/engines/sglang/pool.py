"""A guarded pool: the tracker beside it, whose rows they are, what its cache keeps, and the events that wait.

Hooks tell it what happened, in numbers that the host has; it tells the tracker, in tensors, ahead of the next forward.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantkit.kv_guard.engines.columns import columns_on
from quantkit.kv_guard.engines.sglang.events import DeferredCalls, wait_for
from quantkit.kv_guard.engines.sglang.inbox import Inbox
from quantkit.kv_guard.engines.sglang.kept_pages import KeptPages
from quantkit.kv_guard.engines.sglang.prefixes import Prefixes, salt_of
from quantkit.kv_guard.engines.sglang.readers import Readers
from quantkit.kv_guard.page_tags import PageTagTracker
from quantkit.kv_guard.settings import GuardSettings


@dataclass(slots=True)
class NewPages:
    """Pages of one allocation: ``places`` are those of their first slots among the slots that were handed out."""

    places: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)

    def add(self, row: int, first: int, places: Sequence[int], owners: Sequence[int]) -> None:
        """Pages of a row from ``first`` on."""
        self.places += places
        self.rows += [row] * len(places)
        self.indices += range(first, first + len(places))
        self.owners += owners


class GuardedPool:
    """Of one process: one allocator, one pool of rows, the tree above them."""

    def __init__(self, settings: GuardSettings, allocator: Any, row_pool: Any, *, receives: bool = False) -> None:
        self._device = device = row_pool.req_to_token.device
        self.allocator = allocator
        self.row_pool = row_pool
        self.page_size = settings.size.page_size
        self._num_pages = settings.size.num_pages
        self.tracker = PageTagTracker(settings, device)
        self.events = DeferredCalls()
        self.kept = KeptPages(settings.size.num_pages, device)
        self.inbox = Inbox(settings.size.num_pages, settings.size.num_rows, device) if receives else None
        self.prefixes: dict[int, Prefixes] = {}  # by row
        self.readers = Readers()

    def open(self, row: int, request: Any) -> None:
        """``request`` is a `Req`."""
        salt = salt_of(request.extra_key, request.cache_salt)
        # both sides of a transfer know the room, and each has a name of its own for the request
        name = request.rid if request.bootstrap_room is None else f"room {request.bootstrap_room}"
        self.prefixes[row] = Prefixes(self.tracker.chains, self.page_size, name, salt)
        self.readers.open(row, request.rid)
        self.events.add(self.tracker.open, row, request.rid)

    def close(self, row: int) -> None:
        """A row that is given back; one that was never opened, as at start, is nobody's."""
        if self.prefixes.pop(row, None) is not None:
            self.readers.close(row)
            self.events.add(self.tracker.close, row)
            if self.inbox is not None:
                self.inbox.end(row)

    def grant(self, slots: Tensor, pages: NewPages, *, awaits: bool = False) -> None:
        """``slots`` were handed out by the allocator; ``awaits`` a transfer, which may have come already."""
        if pages.places:
            self.events.add(self._grant, slots, pages, awaits)

    def arrive(self, row: int, first: int, slots: Tensor) -> None:
        """The transfer to pages of a row from ``first`` on is said to be complete; ``slots`` are their first ones."""
        self.events.add(self._arrive, row, first, slots)

    def drained(self, row: int, slots: Tensor) -> None:
        """No transfer writes any more to a row's pages that were to await one; ``slots`` are the first ones.

        What it has left in the inbox goes at once, while nobody else can have the pages: it would pass for what another
        transfer of the same prompt is to bring. Waits for the device.
        """
        if self.inbox is not None:
            self.inbox.empty(self._pages_of(slots))
            wait_for(slots)
        self.events.add(self._drained, row, slots)

    def fill(self, row: int, slots: Tensor) -> None:
        """What was handed out to a row to await a transfer has been filled without one."""
        if self.inbox is not None:
            self.events.add(self._fill, row, slots)

    def holds(self, row: int, slots: Tensor) -> bool:
        """Whether the first pages of a row, whose first slots these are, are its own; what is not is a violation.

        Waits for the device.
        """
        pages = self._pages_of(slots)
        indices = torch.arange(len(pages), device=slots.device)
        if self.inbox is not None:
            self.inbox.take(pages, self.tracker)
        return bool(self.tracker.holds(pages, torch.full_like(indices, row), indices).all())

    def release(self, pages: Tensor) -> None:
        """Pages are free."""
        if pages.numel():
            self.events.add(self._release, pages)

    def take(self, row: int, first: int, slots: Tensor, prefixes: Sequence[bytes]) -> None:
        """The tree takes pages of a row from ``first`` on; ``slots`` are those of the whole prefix."""
        if prefixes:
            entries = self.kept.add(prefixes)
            self.readers.give(row, entries)
            self.events.add(self._take, slots, row, first, entries)

    def share(self, row: int, first: int, prefixes: Sequence[bytes]) -> None:
        """A row reads pages of the tree from ``first`` on. One that nothing is kept for stays never granted."""
        places, entries = self.kept.find(prefixes)
        if entries:
            self.readers.read(row, entries)
            self.events.add(self._share, row, [first + place for place in places], entries)

    def withdraw(self, requests: Iterable[str], step: int) -> set[str]:
        """What ``requests`` have given to the cache since a step was launched is nobody's; whose pages it was, too."""
        entries, readers = self.readers.behind(requests, step)
        self.kept.withdraw(entries)
        return readers

    def clear(self) -> None:
        """Every page is free."""
        self.kept.clear()
        self.events.add(self._clear)

    def carry_out(self) -> None:
        """Tell the tracker what waits, on the stream of the model."""
        self.events.carry_out()
        self.kept.step()

    def _grant(self, slots: Tensor, new: NewPages, awaits: bool) -> None:
        places, rows, indices, owners = columns_on(self._device, (new.places, new.rows, new.indices, new.owners))
        pages = slots[places].long() // self.page_size
        self.tracker.grant(pages, rows, indices, owners)
        if self.inbox is None:
            return
        self.tracker.forget_transfers(pages)  # to former holders: the grant has named who has them now
        if awaits:
            self.tracker.announce(pages, new.rows[0])  # a row is that of one transfer
        else:
            self.inbox.empty(pages)

    def _arrive(self, row: int, first: int, slots: Tensor) -> None:
        assert self.inbox is not None
        pages = self._pages_of(slots)
        indices = torch.arange(first, first + len(pages), device=slots.device)
        self.inbox.take(pages, self.tracker)
        self.tracker.arrive(pages, torch.full_like(indices, row), indices)

    def _drained(self, row: int, slots: Tensor) -> None:
        """What lies in the inbox by now stays: the pages' next holder may have them, and his tags have come."""
        self.tracker.drained(self._pages_of(slots), row)

    def _fill(self, row: int, slots: Tensor) -> None:
        assert self.inbox is not None
        self._drained(row, slots)
        self.inbox.empty(self._pages_of(slots))

    def _pages_of(self, slots: Tensor) -> Tensor:
        """Of first slots as a row names them; page 0, which nobody holds, in place of what the pool does not have."""
        pages = slots.long() // self.page_size
        return torch.where((pages >= 0) & (pages < self._num_pages), pages, 0)

    def _release(self, pages: Tensor) -> None:
        self.kept.forget(pages)
        self.tracker.release(pages)

    def _take(self, slots: Tensor, row: int, first: int, entries: list[int]) -> None:
        (at,) = columns_on(self._device, (entries,))
        indices = torch.arange(first, first + len(entries), device=slots.device)
        pages = self._pages_of(slots[indices * self.page_size])
        self.kept.put(at, pages, self.tracker.cache(pages, torch.full_like(indices, row), indices))

    def _share(self, row: int, places: list[int], entries: list[int]) -> None:
        indices, at = columns_on(self._device, (places, entries))
        self.tracker.share(torch.full_like(indices, row), indices, self.kept.get(at))

    def _clear(self) -> None:
        self.kept.forget_all()
        self.tracker.clear()
