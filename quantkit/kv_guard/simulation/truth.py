"""What is really so in a pool, on its device's time: the books that a guard is judged by.

A grant is a number here, which nothing on its way can change; no seal, owner or tag is looked at. So it is known at
each check which pages are wrong for whom: those the guard must name (`is_sure`), those it may name (content came
without its tag), and no others.

Legend: P pages, R rows, L logical pages, B rows of a batch, N entries, S tokens of a page.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from quantkit.kv_guard.tracker import STEP_CHECKS, Step

NO_TRANSFER = 0  # they are numbered from 1 on


class NoGrant(IntEnum):
    """What stands where no page was granted, in place of the number of a grant."""

    FREE = 0  # of a page
    NOTHING = 0  # of a row that is not open
    NOT_YET = -1  # of one that is
    LEFT_BEHIND = -2  # by a window
    HOLE = -3  # what should be there was stored elsewhere, or copied from elsewhere


class Taint(IntEnum):
    """Whether a page holds what is not its holder's; SURE where a guard can tell, too."""

    NONE = 0
    PERHAPS = 1
    SURE = 2


@dataclass(frozen=True, slots=True)
class Place:
    """Where a check looked and for whom, as a violation names it: ``row`` and ``index`` are None where it names none,
    ``request`` where nobody has the row."""

    check: str
    row: int | None
    index: int | None
    page: int
    request: str | None


Wrongs = Mapping[Place, bool]
"""Where something was wrong; True: a guard that does not say so has missed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looked:
    """At a step's launch: pages and grants that its rows expect, int64 [B, L], and which of them are read."""

    step: Step
    expected: Tensor
    is_read: Tensor
    names: dict[int, str]


class TrueBooks:
    """Who holds which page, which row was granted what, and where somebody else has written."""

    def __init__(self, num_pages: int, num_rows: int, most_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.grants_P = torch.zeros(num_pages, dtype=torch.int64)
        self.waits_for_P = torch.zeros(num_pages, dtype=torch.int64)  # the transfer that was announced
        self.taints_P = torch.zeros(num_pages, dtype=torch.int64)
        self.landed_P = torch.zeros(num_pages, dtype=torch.int64)  # on a free page: the taint that its next holder has
        self.is_shared_P = torch.zeros(num_pages, dtype=torch.bool)
        self.is_tagged_P = self.is_shared_P.clone()
        self.is_struck_P = self.is_shared_P.clone()  # a token was stored there while a transfer was under way
        self.is_touched_P = self.is_shared_P.clone()
        self._gone: list[set[int]] = [set() for _ in range(num_pages)]  # transfers to former holders, not over
        self.expected_RL = torch.zeros(num_rows, most_pages, dtype=torch.int64)
        self.names: dict[int, str] = {}
        self._num_grants = 0

    def forget_gone(self) -> None:
        """Every transfer is over."""
        for transfers in self._gone:
            transfers.clear()

    def next_grants(self, count: int) -> Tensor:
        """Numbers that nothing was granted under."""
        first = self._num_grants + 1
        self._num_grants += count
        return torch.arange(first, first + count)

    def expected(self, rows: Tensor, indices: Tensor) -> Tensor:
        """Grants; NoGrant.NOTHING of what no row has."""
        num_rows, row_pages = self.expected_RL.shape
        is_place = (rows >= 0) & (rows < num_rows) & (indices >= 0) & (indices < row_pages)
        at = torch.where(is_place, rows, 0), torch.where(is_place, indices, 0)
        return torch.where(is_place, self.expected_RL[at], NoGrant.NOTHING)

    def is_other(self, pages: Tensor, grants: Tensor) -> tuple[Tensor, Tensor]:
        """Where a page is not, or may not be, what was granted under ``grants``: surely, and perhaps."""
        is_inside = (pages >= 0) & (pages < self.num_pages)
        safe = torch.where(is_inside, pages, 0)
        taints = self.taints_P[safe]
        is_sure = ~is_inside | (self.grants_P[safe] != grants) | (grants <= 0) | (taints == Taint.SURE)
        has_not_come = self.waits_for_P[safe] != NO_TRANSFER
        is_sure |= self.is_tagged_P[safe] | has_not_come
        return is_sure, is_sure | (taints != Taint.NONE)

    def count_gone(self, pages: Tensor) -> None:
        """Their holder waits no more for what they wait for."""
        for page, transfer in zip(pages.tolist(), self.waits_for_P[pages].tolist(), strict=True):
            if transfer != NO_TRANSFER:
                self._gone[page].add(transfer)

    def is_dirty(self, pages: Tensor) -> Tensor:
        """Where a transfer to a former holder may still write."""
        return torch.tensor([bool(self._gone[page]) for page in pages.tolist()], dtype=torch.bool)

    def grant(self, pages: Tensor, grants: Tensor) -> None:
        """To whoever holds them from now on: nothing of what was matters, but a transfer that may still write there."""
        landed = torch.where(self.is_dirty(pages), Taint.SURE, self.landed_P[pages])
        self.grants_P[pages] = grants
        self.taints_P[pages] = landed
        self.is_touched_P[pages] = landed == Taint.SURE
        self.landed_P[pages] = Taint.NONE
        self.is_shared_P[pages] = self.is_tagged_P[pages] = self.is_struck_P[pages] = False
        self.waits_for_P[pages] = NO_TRANSFER

    def release(self, pages: Tensor) -> None:
        """Of whatever was written there nothing is left that concerns anybody."""
        self.count_gone(pages)
        self.grants_P[pages] = NoGrant.FREE
        self.taints_P[pages] = self.landed_P[pages] = Taint.NONE
        self.is_shared_P[pages] = self.is_tagged_P[pages] = self.is_struck_P[pages] = False
        self.waits_for_P[pages] = NO_TRANSFER

    def announce(self, pages: Tensor, transfer: int) -> Tensor:
        """It may write to pages that one row holds; which those are, bool [N]. Others it spoils, now or later."""
        is_waiting = self.waits_for_P[pages] != NO_TRANSFER
        is_held = (self.grants_P[pages] != NoGrant.FREE) & ~self.is_shared_P[pages] & ~is_waiting
        for page in pages[~is_held & ~is_repeated(pages)].tolist():
            self._gone[page].add(transfer)
        self.is_touched_P[pages] |= is_waiting
        is_shared = self.is_shared_P[pages]
        self.taints_P[pages] = torch.where(is_shared, Taint.SURE, self.taints_P[pages])
        self.waits_for_P[pages] = torch.where(is_held, transfer, self.waits_for_P[pages])
        self.is_tagged_P[pages] &= ~is_held
        return is_held

    def drained(self, pages: Tensor, transfer: int) -> None:
        """Nothing of it is on its way, whoever holds them now."""
        for page in pages.tolist():
            self._gone[page].discard(transfer)
        is_over = self.waits_for_P[pages] == transfer
        self.waits_for_P[pages] = torch.where(is_over, NO_TRANSFER, self.waits_for_P[pages])
        is_spoiled = is_over & (self.is_struck_P[pages] | self.is_touched_P[pages])
        self.taints_P[pages] = torch.where(is_spoiled, Taint.SURE, self.taints_P[pages])
        self.is_struck_P[pages] &= ~is_over

    def land(self, pages: Tensor, transfer: int, taints: Tensor, *, is_tag: bool) -> None:
        """A transfer writes, beside the stream: right where it was announced for the holder, and nowhere else."""
        is_right = self.waits_for_P[pages] == transfer
        is_free = self.grants_P[pages] == NoGrant.FREE
        stray = torch.full_like(pages, Taint.SURE if is_tag else Taint.PERHAPS)
        now = self.taints_P[pages]
        now = torch.where(self.is_struck_P[pages], now, now.clamp(max=Taint.PERHAPS)) if is_tag else now
        brought = taints if is_tag else taints.clamp(max=Taint.PERHAPS)
        wrong = torch.where(is_free, self.taints_P[pages], torch.maximum(self.taints_P[pages], stray))
        self.taints_P[pages] = torch.where(is_right, torch.maximum(now, brought), wrong)
        self.landed_P[pages] = torch.where(is_free, torch.maximum(self.landed_P[pages], stray), self.landed_P[pages])
        if is_tag:
            self.is_tagged_P[pages] |= is_right

    def taint(self, pages: Tensor, is_sure: Tensor, is_possible: Tensor) -> None:
        """What they hold is, or may be, another's."""
        taints = torch.where(is_sure, Taint.SURE, torch.where(is_possible, Taint.PERHAPS, Taint.NONE))
        self.taints_P[pages] = torch.maximum(self.taints_P[pages], taints)

    def doubt(self, pages: Tensor) -> None:
        """What they hold is wrong, and no tag says so."""
        self.taints_P[pages] = self.taints_P[pages].clamp(min=Taint.PERHAPS)

    def take(self, pages: Tensor, is_right: Tensor) -> None:
        """A transfer is over; ``is_right`` where it brought what it should."""
        taints = self.taints_P[pages].clamp(max=Taint.PERHAPS)
        taints = torch.where(is_right, taints, Taint.PERHAPS)
        self.taints_P[pages] = torch.where(self.is_touched_P[pages] | self.is_struck_P[pages], Taint.SURE, taints)
        self.is_tagged_P[pages] = self.is_struck_P[pages] = False
        self.waits_for_P[pages] = NO_TRANSFER


class Truth:
    """Of one pool: its books, and what was wrong in them at each check since the last step."""

    def __init__(self, books: TrueBooks, null_page: int) -> None:
        self.books = books
        self._null_page = null_page
        self._wrongs: dict[Place, bool] = {}
        self._closed: deque[tuple[int, Wrongs]] = deque()
        self._step = 0
        self._looked: _Looked | None = None

    def note(
        self,
        check: str,
        pages: Tensor,
        wrong: tuple[Tensor, Tensor],
        rows: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> None:
        """``wrong``: surely, and perhaps; all [N]."""
        is_sure, is_possible = wrong
        found = (is_sure | is_possible).nonzero()[:, 0].tolist()
        names = self._looked.names if self._looked is not None and check in STEP_CHECKS else self.books.names
        for at in found:
            row = None if rows is None else int(rows[at])
            index, request = None if indices is None else int(indices[at]), None if row is None else names.get(row)
            place = Place(check, row, index, int(pages[at]), request)
            self._wrongs[place] = bool(is_sure[at]) or self._wrongs.get(place, False)

    def look(self, step: Step) -> None:
        """Before a step."""
        pages, slots_off = self._pages(step)
        index_1L = torch.arange(step.most_pages)[None]
        expected = self.books.expected(step.rows[:, None].expand_as(pages), index_1L.expand_as(pages))
        is_read = index_1L * self.books.page_size < step.lengths[:, None]
        if step.firsts is not None:
            is_read &= index_1L >= step.firsts[:, None]
        is_left = (expected == NoGrant.NOTHING) | ((expected == NoGrant.LEFT_BEHIND) & (step.firsts is None))
        is_read &= (pages != self._null_page) | ~is_left
        self._looked = _Looked(step=step, expected=expected, is_read=is_read, names=dict(self.books.names))
        self._compare("before_step", pages, slots_off)

    def look_again(self) -> None:
        """Behind it: at the pages that its rows name by now."""
        assert self._looked is not None, "before_step was not called"
        self._compare("after_step", *self._pages(self._looked.step))
        self._looked = None
        self._closed.append((self._step, self._wrongs))
        self._step += 1
        self._wrongs = {}

    def of(self, step: int) -> Wrongs:
        """What was wrong in a step, and at the events before it."""
        while self._closed[0][0] < step:
            self._closed.popleft()
        return self._closed.popleft()[1]

    def settle(self) -> Wrongs:
        """Since the last step."""
        return self._wrongs

    def forget(self) -> None:
        """What was read."""
        self._wrongs = {}

    def _pages(self, step: Step) -> tuple[Tensor, Tensor | None]:
        """Pages that rows name, int64 [B, L]; where they name tokens, which are out of their place, [B, L, S]."""
        size = self.books.page_size
        if not step.by_token:
            return step.table[step.rows[:, None], torch.arange(step.most_pages)[None]].long(), None
        positions = torch.arange(step.most_pages * size)
        slots = step.table[step.rows[:, None], positions[None]].long().reshape(len(step.rows), -1, size)
        pages = slots[:, :, 0] // size
        is_off = slots != pages[:, :, None] * size + torch.arange(size)
        is_off &= (positions < step.lengths[:, None]).reshape(is_off.shape)
        return pages, is_off

    def _compare(self, check: str, pages: Tensor, is_off: Tensor | None) -> None:
        looked = self._looked
        assert looked is not None, "before_step was not called"
        is_sure, is_possible = self.books.is_other(pages, looked.expected)
        if is_off is not None:
            is_sure = is_sure | is_off[:, :, 0]  # the first slot of a page is what a guard reads
            is_possible = is_possible | is_off.any(2)
        at = (is_possible & looked.is_read).nonzero()
        if len(at):
            rows, indices = at[:, 0], at[:, 1]
            wrong = is_sure[rows, indices], is_possible[rows, indices]
            self.note(check, pages[rows, indices], wrong, looked.step.rows[rows], indices)


def is_repeated(pages: Tensor) -> Tensor:
    """Entries whose page stands before them in the list."""
    listed = pages.tolist()
    return torch.tensor([page in listed[:at] for at, page in enumerate(listed)], dtype=torch.bool)
