"""The tracker that tags pages: arrays beside a pool, and what each event does to them."""

import secrets
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.kv_guard import page_events, transfer_events
from quantkit.kv_guard.dispatch import (
    NEVER,
    UNGRANTED,
    Captured,
    Expectations,
    PageTags,
    State,
    Word,
    new_captured,
    ops_for,
    twins,
)
from quantkit.kv_guard.identity import Chains
from quantkit.kv_guard.own_pages import own_pages
from quantkit.kv_guard.page_arrays import Words, new_arrays, put
from quantkit.kv_guard.settings import GuardSettings
from quantkit.kv_guard.tracker import Held, KvGuardError, Mode, NullTracker, Step, Tracker, Verdict
from quantkit.kv_guard.verdicts import Verdicts


class PageTagTracker:
    """Tags of one pool. Not for two threads at once; its operations belong on the stream that runs the model."""

    is_on = True

    def __init__(self, settings: GuardSettings, device: torch.device | str = "cpu") -> None:
        settings.check()
        size = settings.size
        self.settings = settings
        self.chains = Chains(settings.identity.key(settings.secret))
        self._arrays = new_arrays(size, settings.ring_lines, device)
        self._ops = ops_for(self.tags.seals_P.device)
        self._verdicts = Verdicts(settings, self._arrays.ring, on=self.tags.seals_P)
        self.metrics = self._verdicts.metrics
        self._captured: Captured = new_captured(size.num_rows, size.most_pages, device)
        first = settings.first_generation
        self._generation = (secrets.randbits(64) or 1) if first is None else first
        self._launched: Step | None = None
        self._has_transfers = False  # nothing is looked at that only they could have done
        self.clear()

    @property
    def tags(self) -> PageTags:
        """What lies at pages."""
        return self._arrays.tags

    @property
    def expectations(self) -> Expectations:
        """What rows were granted."""
        return self._arrays.expectations

    @property
    def names(self) -> Mapping[int, str]:
        """The requests of rows."""
        return self._verdicts.openings.by_row

    def open(self, row: int, request: str) -> None:
        former, opening = self._verdicts.openings.open(row, request)
        if former:
            page_events.name_both(self._arrays, row, (former, opening), self._verdicts.step)
        self._expect_nothing(row, UNGRANTED, opening)

    def close(self, row: int) -> None:
        self._verdicts.openings.close(row)
        self._expect_nothing(row, NEVER, 0)

    def _expect_nothing(self, row: int, instead: int, opening: int) -> None:
        if 0 <= row < self.settings.size.num_rows:
            self.expectations.seals_RL[row].fill_(instead)
            self.expectations.openings_R[row].fill_(opening)

    def grant(
        self, pages: Tensor, rows: Tensor, indices: Tensor, owners: Tensor, first_generation: int | None = None
    ) -> None:
        drawn = self._next_generations(len(pages)) if first_generation is None else first_generation
        if self._has_transfers:
            transfer_events.check_untouched(self._arrays, pages, self._subject(rows) | {Word.INDEX: indices})
        self._ops.grant_pages(
            self.tags,
            self.expectations,
            self._arrays.ring,
            pages,
            rows,
            indices,
            owners,
            first_generation=drawn,
            step=self._verdicts.step,
        )
        if self._has_transfers:
            transfer_events.take_over(self._arrays, pages, twins.generations(drawn, len(pages), pages.device))

    def release(self, pages: Tensor) -> None:
        if self._has_transfers:
            transfer_events.check_over(self._arrays, pages, self._subject(-1))
        first = self._next_generations(len(pages))
        self._ops.release_pages(self.tags, self._arrays.ring, pages, first_generation=first, step=self._verdicts.step)

    def cache(self, pages: Tensor, rows: Tensor, indices: Tensor) -> Held:
        held = page_events.held_by(self.expectations, rows, indices)
        is_held = page_events.check_holder(self._arrays, pages, held, self._subject(rows))
        page_events.share_pages(self.tags, pages, is_held)
        return held

    def share(self, rows: Tensor, indices: Tensor, held: Held) -> None:
        page_events.expect(self.expectations, rows, indices, held)

    def move(self, sources: Tensor, targets: Tensor, rows: Tensor, indices: Tensor) -> None:
        held = page_events.held_by(self.expectations, rows, indices)
        is_held = page_events.check_holder(self._arrays, sources, held, self._subject(rows))
        is_shared = page_events.is_shared(self.tags, sources)
        self.grant(targets, rows, indices, held.owners)
        page_events.spoil(self.tags, targets, ~is_held)
        page_events.share_pages(self.tags, targets, is_shared)
        self.release(sources)

    def fork(self, row: int, to_row: int, pages: Tensor) -> None:
        indices = torch.arange(len(pages), device=pages.device)
        held = page_events.held_by(self.expectations, torch.full_like(indices, row), indices)
        to_rows = torch.full_like(indices, to_row)
        is_held = page_events.check_holder(self._arrays, pages, held, self._subject(to_rows))
        page_events.expect(self.expectations, to_rows, indices, held)
        page_events.share_pages(self.tags, pages, is_held)

    def copied(self, sources: Tensor, rows: Tensor, indices: Tensor, to_rows: Tensor) -> None:
        held = page_events.held_by(self.expectations, rows, indices)
        is_held = page_events.check_holder(self._arrays, sources, held, self._subject(to_rows))
        page_events.leave_holes(self.expectations, to_rows, indices, ~is_held)

    def truncate(self, rows: Tensor, num_pages: Tensor) -> None:
        page_events.truncate(self.expectations, rows, num_pages)

    def prune(self, rows: Tensor, firsts: Tensor) -> None:
        page_events.prune(self.expectations, rows, firsts)

    def clear(self) -> None:
        self._verdicts.openings.clear()
        self.expectations.seals_RL.fill_(NEVER)
        self.expectations.openings_R.fill_(0)
        if self._has_transfers:
            transfer_events.check_over(self._arrays, page_events.every_page(self.tags), self._subject(-1))
        page_events.free_all(self.tags, self._next_generations(self.tags.num_pages))

    def announce(self, pages: Tensor, transfer: int) -> None:
        self._begin_transfer(transfer)
        transfer_events.await_pages(self._arrays, pages, transfer, self._subject(-1))

    def drained(self, pages: Tensor, transfer: int) -> None:
        transfer_events.drain(self._arrays, pages, transfer)

    def forget_transfers(self, pages: Tensor) -> None:
        put(self._arrays.gone_P, pages, 0)

    def reserve(self, pages: Tensor, transfer: int) -> None:
        self._begin_transfer(transfer)
        transfer_events.reserve_pages(self._arrays, pages, transfer, self._subject(-1))

    def send(self, pages: Tensor, held: Held, checksums: Tensor | None = None) -> Tensor:
        self.sent(pages, held)
        return transfer_events.wire_tags(self.tags, pages, checksums)

    def lift(self, pages: Tensor) -> Tensor:
        return transfer_events.wire_tags(self.tags, pages, None)

    def land(self, pages: Tensor, tags: Tensor) -> None:
        self._begin_transfer()
        transfer_events.land_tags(self.tags, pages, tags)

    def sent(self, pages: Tensor, held: Held) -> None:
        page_events.check_holder(self._arrays, pages, held, self._subject(-1))

    def holds(self, pages: Tensor, rows: Tensor, indices: Tensor) -> Tensor:
        held = page_events.held_by(self.expectations, rows, indices)
        return page_events.check_holder(self._arrays, pages, held, self._subject(-1))

    def arrive(self, pages: Tensor, rows: Tensor, indices: Tensor, checksums: Tensor | None = None) -> None:
        held = page_events.held_by(self.expectations, rows, indices)
        transfer_events.accept_arrived(self._arrays, pages, held, checksums, self._subject(rows), state=State.HELD)

    def store(self, pages: Tensor, held: Held, checksums: Tensor | None = None) -> Held:
        own = twins.generations(self._next_generations(len(pages)), len(pages), pages.device)
        kept = Held(generations=own, owners=held.owners.to(own.device), indices=held.indices.to(own.device))
        transfer_events.accept_arrived(self._arrays, pages, kept, checksums, self._subject(-1), state=State.SHARED)
        return kept

    def own_pages(self, row: int, first: int, count: int) -> Tensor:
        granted = self._arrays.granted_P if self._has_transfers else self.tags.records_P3[:, 0].contiguous()
        return own_pages(self._arrays, granted, row, first, count)

    def before_step(self, step: Step) -> int:
        if step.most_pages > self.settings.size.most_pages or len(step.rows) > self.settings.size.num_rows:
            raise KvGuardError(
                f"a batch of {len(step.rows)} rows and {step.most_pages} pages, {self.settings.size} was said",
                remedy="attach the guard with the sizes of this pool",
            )
        if self._launched is not None:
            raise KvGuardError(
                "a step was launched before the one ahead of it was checked behind it",
                remedy="call after_step behind each step, in the order of its stream",
            )
        number, most_pages = self._verdicts.step, max(step.most_pages, 1)  # of rows that have tokens one is looked at
        with self._verdicts.stopwatch:
            self._ops.check_pages(
                self.tags,
                self.expectations,
                self._arrays.ring,
                step.table,
                step.rows,
                step.lengths,
                step.firsts,
                page_size=self.settings.size.page_size,
                by_token=step.by_token,
                most_pages=most_pages,
                step=number,
                null_page=self.settings.size.null_page,
                captured=self._captured,
            )
        self._launched = replace(step, most_pages=most_pages)
        self._verdicts.count_checked(len(step.rows) * most_pages)
        return number

    def launched_pages(self) -> Tensor:
        step = self._launched
        assert step is not None, "before_step was not called"
        return self._captured.pages_BL[: len(step.rows), : step.most_pages].reshape(-1).long()

    def check_writes(self, slots: Tensor, rows: Tensor, positions: Tensor) -> None:
        with self._verdicts.stopwatch:
            self._ops.check_writes(
                self.tags,
                self.expectations,
                self._arrays.ring,
                slots,
                rows,
                positions,
                page_size=self.settings.size.page_size,
                step=self._verdicts.step,
                null_page=self.settings.size.null_page,
            )

    def after_step(self) -> None:
        step = self._launched
        assert step is not None, "before_step was not called"
        with self._verdicts.stopwatch:
            if step.is_steady:
                page_events.read_again(self._captured, step, self.settings.size)
            self._ops.check_captured(
                self.tags,
                self.expectations,
                self._arrays.ring,
                self._captured,
                step.rows,
                most_pages=step.most_pages,
                step=self._verdicts.step,
            )
        self._verdicts.count_checked(len(step.rows) * step.most_pages)
        self._launched = None
        self._verdicts.close_step()

    def verdict(self, step: int) -> Verdict:
        return self._verdicts.of(step)

    def settle(self) -> Verdict:
        assert self._launched is None, "a step is running"
        return self._verdicts.settle()

    def _begin_transfer(self, transfer: int = 0) -> None:
        """Until the first of them a page's record says under which generation it was granted."""
        assert 0 <= transfer < 1 << 63, transfer
        if not self._has_transfers:
            self._has_transfers = True
            self._arrays.granted_P.copy_(self.tags.records_P3[:, 0])

    def _subject(self, rows: Tensor | int) -> Words:
        return page_events.subject(self.expectations, rows, self._verdicts.step)

    def _next_generations(self, count: int) -> int:
        """The first of ``count`` numbers that nothing was granted under, of 2^64; 0 is left out."""
        first = self._generation
        self._generation = first + count
        if self._generation >= 1 << 64:
            self._generation -= (1 << 64) - 1
        return first


def new_tracker(settings: GuardSettings | None, device: torch.device | str = "cpu") -> Tracker:
    """One that tags pages; for None, or in mode off, the one that does nothing."""
    if settings is None or settings.mode is Mode.OFF:
        return NullTracker()
    return PageTagTracker(settings, device)
