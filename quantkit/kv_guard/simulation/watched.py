"""A guard and the truth about its pool, told the same: whatever an engine says to the one, the other hears."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.kv_guard.identity import Chains
from quantkit.kv_guard.settings import PoolSize
from quantkit.kv_guard.simulation.truth import NO_TRANSFER, NoGrant, Taint, TrueBooks, Truth, Wrongs, is_repeated
from quantkit.kv_guard.tracker import Held, Step, Tracker, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Known(Held):
    """What a guard returned, and the grants that it should speak of."""

    grants: Tensor

    def __getitem__(self, part: slice | Tensor) -> "Known":
        return Known(
            generations=self.generations[part],
            owners=self.owners[part],
            indices=self.indices[part],
            grants=self.grants[part],
        )


@dataclass(frozen=True, slots=True)
class Lifted:
    """What a transfer reads beside the pages: the guard's tags, and what is wrong with the pages."""

    tags: Tensor
    taints: Tensor


class Watched:
    """The events are those of `tracker.Tracker`; a transfer has a number here, by which its pages wait for it."""

    def __init__(self, guard: Tracker, size: PoolSize) -> None:
        self.guard = guard
        self.is_on = guard.is_on
        self.books = TrueBooks(size.num_pages, size.num_rows, size.most_pages, size.page_size)
        self.truth = Truth(self.books, size.null_page)
        self._null_page = size.null_page

    @property
    def chains(self) -> Chains:
        return self.guard.chains

    def open(self, row: int, request: str) -> None:
        self.books.names[row] = request
        self.books.expected_RL[row] = NoGrant.NOT_YET
        self.guard.open(row, request)

    def close(self, row: int) -> None:
        self.books.names.pop(row, None)
        self.books.expected_RL[row] = NoGrant.NOTHING
        self.guard.close(row)

    def grant(self, pages: Tensor, rows: Tensor, indices: Tensor, owners: Tensor) -> None:
        self._grant(pages, rows, indices)
        self.guard.grant(pages, rows, indices, owners)

    def release(self, pages: Tensor) -> None:
        self._release(pages)
        self.guard.release(pages)

    def cache(self, pages: Tensor, rows: Tensor, indices: Tensor) -> Known:
        grants = self.books.expected(rows, indices)
        self._note_holder(pages, grants, rows, indices)
        held = self.guard.cache(pages, rows, indices)
        return Known(generations=held.generations, owners=held.owners, indices=held.indices, grants=grants)

    def share(self, rows: Tensor, indices: Tensor, held: Known) -> None:
        self.books.expected_RL[rows, indices] = held.grants
        self.guard.share(rows, indices, held)

    def move(self, sources: Tensor, targets: Tensor, rows: Tensor, indices: Tensor) -> None:
        books = self.books
        is_other = books.is_other(sources, books.expected(rows, indices))
        self.truth.note("holder", sources, is_other, rows, indices)
        is_shared = books.is_shared_P[sources]
        self._grant(targets, rows, indices)
        books.taint(targets, *is_other)  # a copy of what is wrong is no better
        books.is_shared_P[targets] = is_shared
        self._release(sources)
        self.guard.move(sources, targets, rows, indices)

    def fork(self, row: int, to_row: int, pages: Tensor) -> None:
        indices = torch.arange(len(pages))
        grants = self.books.expected_RL[row, : len(pages)].clone()
        self._note_holder(pages, grants, torch.full_like(indices, to_row), indices)
        self.books.expected_RL[to_row, : len(pages)] = grants
        self.guard.fork(row, to_row, pages)

    def copied(self, sources: Tensor, rows: Tensor, indices: Tensor, to_rows: Tensor) -> None:
        books = self.books
        is_other = books.is_other(sources, books.expected(rows, indices))
        self.truth.note("holder", sources, is_other, to_rows, indices)
        books.expected_RL[to_rows[is_other[0]], indices[is_other[0]]] = NoGrant.HOLE
        self.guard.copied(sources, rows, indices, to_rows)

    def truncate(self, rows: Tensor, num_pages: Tensor) -> None:
        for row, count in zip(rows.tolist(), num_pages.tolist(), strict=True):
            self.books.expected_RL[row, count:] = NoGrant.NOT_YET
        self.guard.truncate(rows, num_pages)

    def prune(self, rows: Tensor, firsts: Tensor) -> None:
        for row, first in zip(rows.tolist(), firsts.tolist(), strict=True):
            self.books.expected_RL[row, :first] = NoGrant.LEFT_BEHIND
        self.guard.prune(rows, firsts)

    def restart(self) -> None:
        """Every row is closed, nothing is under way, and every page is free."""
        for row in range(1, len(self.books.expected_RL)):
            self.close(row)
        waits_for_P = self.books.waits_for_P.clone()
        for transfer in {*waits_for_P.tolist()} - {NO_TRANSFER}:
            self.drained((waits_for_P == transfer).nonzero()[:, 0], transfer)
        pages = torch.arange(self.books.num_pages)
        self.books.forget_gone()
        self.guard.forget_transfers(pages)
        self.books.release(pages)
        self.books.is_touched_P.fill_(False)
        self.guard.clear()

    def announce(self, pages: Tensor, transfer: int) -> None:
        is_other = ~self.books.announce(pages, transfer) | is_repeated(pages)
        self.truth.note("announcement", pages, (is_other, is_other))
        self.guard.announce(pages, transfer)

    def drained(self, pages: Tensor, transfer: int) -> None:
        self.books.drained(pages, transfer)
        self.guard.drained(pages, transfer)

    def reserve(self, pages: Tensor, transfer: int) -> None:
        books = self.books
        books.count_gone(pages)
        self._note_touched(pages, None, None)
        is_held = (books.grants_P[pages] != NoGrant.FREE) | is_repeated(pages)
        self.truth.note("grant", pages, (is_held, is_held))
        books.grant(pages, books.next_grants(len(pages)))
        books.waits_for_P[pages] = transfer
        self.guard.reserve(pages, transfer)

    def send(self, pages: Tensor, held: Known, checksums: Tensor | None = None) -> Tensor:
        self.truth.note("holder", pages, self.books.is_other(pages, held.grants))
        return self.guard.send(pages, held, checksums)

    def sent(self, pages: Tensor, held: Known) -> None:
        self.truth.note("holder", pages, self.books.is_other(pages, held.grants))
        self.guard.sent(pages, held)

    def lift(self, pages: Tensor, sent: Known | None) -> Lifted:
        """What was sent may not be what lies there by now."""
        taints = self.books.taints_P[pages]
        if sent is not None:
            taints = torch.where(self.books.grants_P[pages] == sent.grants, taints, taints.clamp(min=Taint.PERHAPS))
        return Lifted(self.guard.lift(pages), taints)

    def land(self, pages: Tensor, transfer: int, lifted: Lifted) -> None:
        self.books.land(pages, transfer, lifted.taints, is_tag=True)
        self.guard.land(pages, lifted.tags)

    def land_content(self, pages: Tensor, transfer: int, source: "Watched", sources: Tensor) -> None:
        """Of pages of another pool; the guard hears nothing of it."""
        self.books.land(pages, transfer, source.books.taints_P[sources], is_tag=False)

    def arrive(
        self, pages: Tensor, rows: Tensor, indices: Tensor, is_right: Tensor, checksums: Tensor | None = None
    ) -> None:
        """``is_right``: pages that hold what the row's request has there."""
        grants = self.books.expected(rows, indices)
        is_other = self.books.grants_P[pages] != grants
        is_sure = self._note_arrived(pages, is_right & ~is_other, rows, indices)
        self._take_over(pages, grants, ~is_sure & (grants > NoGrant.NOTHING))
        self.guard.arrive(pages, rows, indices, checksums)

    def store(self, pages: Tensor, held: Known, is_right: Tensor, checksums: Tensor | None = None) -> Known:
        books, grants = self.books, self.books.next_grants(len(pages))
        is_awaited = books.waits_for_P[pages] != NO_TRANSFER
        is_sure = self._note_arrived(pages, is_right, None, None)
        self._take_over(pages, grants, ~is_sure | is_awaited)
        books.is_shared_P[pages] |= is_awaited
        kept = self.guard.store(pages, held, checksums)
        return Known(generations=kept.generations, owners=kept.owners, indices=kept.indices, grants=grants)

    def before_step(self, step: Step) -> int:
        self.truth.look(step)
        return self.guard.before_step(step)

    def check_writes(self, slots: Tensor, rows: Tensor, positions: Tensor) -> None:
        books, size = self.books, self.books.page_size
        pages, indices = slots // size, positions // size
        grants = books.expected(rows, indices)
        is_stored = (slots >= 0) & ((pages != self._null_page) | (grants > 0))
        is_inside = (pages >= 0) & (pages < books.num_pages)
        is_sure, is_possible = books.is_other(pages, grants)
        is_elsewhere = is_sure | (slots % size != positions % size)
        is_sure = is_elsewhere | books.is_shared_P[torch.where(is_inside, pages, 0)]
        self.truth.note("write", pages, (is_sure & is_stored, (is_sure | is_possible) & is_stored), rows, indices)
        is_hole = is_elsewhere & is_stored & (grants > 0)
        books.expected_RL[rows[is_hole], indices[is_hole]] = NoGrant.HOLE
        spoiled = pages[is_sure & is_stored & is_inside]
        books.taints_P[spoiled] = torch.where(books.grants_P[spoiled] == NoGrant.FREE, Taint.NONE, Taint.SURE)
        books.is_struck_P[spoiled] |= books.waits_for_P[spoiled] != NO_TRANSFER
        books.landed_P[spoiled] = books.landed_P[spoiled].clamp(max=Taint.PERHAPS)  # its tag is written over
        self.guard.check_writes(slots, rows, positions)

    def after_step(self) -> None:
        self.truth.look_again()
        self.guard.after_step()

    def verdict(self, step: int) -> tuple[Verdict, Wrongs]:
        return self.guard.verdict(step), self.truth.of(step)

    def settle(self) -> tuple[Verdict, Wrongs]:
        wrongs = self.truth.settle()
        self.truth.forget()
        return self.guard.settle(), wrongs

    def _grant(self, pages: Tensor, rows: Tensor, indices: Tensor) -> None:
        books, grants = self.books, self.books.next_grants(len(pages))
        books.count_gone(pages)
        self._note_touched(pages, rows, indices)
        is_held = (books.grants_P[pages] != NoGrant.FREE) | is_repeated(pages)
        self.truth.note("grant", pages, (is_held, is_held), rows, indices)
        books.grant(pages, grants)
        books.expected_RL[rows, indices] = grants

    def _note_holder(self, pages: Tensor, grants: Tensor, rows: Tensor, indices: Tensor) -> None:
        """Who shares pages must hold them, and then nobody writes there any more."""
        wrong = self.books.is_other(pages, grants)
        self.truth.note("holder", pages, wrong, rows, indices)
        self.books.is_shared_P[pages] |= ~wrong[0]

    def _release(self, pages: Tensor) -> None:
        books = self.books
        is_awaited = books.waits_for_P[pages] != NO_TRANSFER
        self.truth.note("landing", pages, (is_awaited, is_awaited))
        is_free = (books.grants_P[pages] == NoGrant.FREE) | is_repeated(pages)
        self.truth.note("release", pages, (is_free, is_free))
        books.release(pages)

    def _note_touched(self, pages: Tensor, rows: Tensor | None, indices: Tensor | None) -> None:
        """Something has landed there since the release, or may yet."""
        books = self.books
        landed = torch.where(books.grants_P[pages] == NoGrant.FREE, books.landed_P[pages], Taint.NONE)
        is_sure = books.is_dirty(pages) | (landed == Taint.SURE)
        self.truth.note("landing", pages, (is_sure, is_sure | (landed != Taint.NONE)), rows, indices)

    def _note_arrived(self, pages: Tensor, is_right: Tensor, rows: Tensor | None, indices: Tensor | None) -> Tensor:
        """What has no tag of its transfer, or was released meanwhile, has surely not arrived: bool [N]."""
        books = self.books
        is_free = books.grants_P[pages] == NoGrant.FREE
        is_sure = is_free | books.is_struck_P[pages] | ~books.is_tagged_P[pages] & (books.taints_P[pages] == Taint.NONE)
        is_right = is_right & ~is_free & books.is_tagged_P[pages] & (books.taints_P[pages] == Taint.NONE)
        for check in ("arrival", "content"):
            self.truth.note(check, pages, (is_sure & (check == "arrival"), ~is_right), rows, indices)
        books.take(pages, is_right)
        return is_sure

    def _take_over(self, pages: Tensor, grants: Tensor, which_N: Tensor) -> None:
        """What has arrived is his who waited; whoever was granted the page meanwhile is wronged from now on."""
        self.books.grants_P[pages] = torch.where(which_N, grants, self.books.grants_P[pages])
