"""Rarer events of a page's life, in torch operations that wait for no device; the frequent ones are kernels.

A page that the pool does not have is a violation where somebody says that he holds it, or is given it; elsewhere it is
passed over.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.kv_guard.dispatch import (
    FREE_INDEX,
    MARK,
    MOST_PAGES,
    NEVER,
    PLACE_MASK,
    SHIFTED,
    SPOILED,
    UNARRIVED,
    Captured,
    Check,
    Expectations,
    PageTags,
    State,
    Word,
    twins,
)
from quantkit.kv_guard.page_arrays import PageArrays, places_of, put, read
from quantkit.kv_guard.settings import PoolSize
from quantkit.kv_guard.tracker import Held, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Of whom a violation speaks: rows [N], or -1 where a node of a cache is the holder; and in which step."""

    rows: Tensor | int
    step: int


def check_holder(arrays: PageArrays, pages: Tensor, held: Held, subject: Subject) -> Tensor:
    """Whoever passes pages on must hold them: what lies there is what was granted. Bool [N]: it is so."""
    seals = twins.seal_of(held.generations, held.owners, held.indices)
    found = twins.found_words(arrays.tags, pages)
    is_other = (found[Word.FOUND_SEAL] != seals) | (_states(arrays.tags, pages) == State.FREE)
    words = _holder_words(held, seals, subject) | found
    twins.append_lines(arrays.ring, is_other, words | {Word.CHECK: Check.HOLDER})
    return ~is_other


def _states(tags: PageTags, pages: Tensor) -> Tensor:
    """-1 of pages that the pool does not have."""
    return read(tags.states_P, pages, -1)


def set_states(tags: PageTags, pages: Tensor, *, of: State, to: State) -> None:
    """Of pages that are in a state."""
    put(tags.states_P, pages, to, _states(tags, pages) == of)


def share_pages(tags: PageTags, pages: Tensor, which_N: Tensor) -> None:
    """Those that are held are written no more from here on; what else lies there stays what it is, a transfer's too."""
    put(tags.states_P, pages, State.SHARED, which_N)


def spoil(tags: PageTags, pages: Tensor, which_N: Tensor) -> None:
    """Nobody passes there who reads them, now or later."""
    put(tags.seals_P, pages, twins.mark_of(pages) ^ SPOILED, which_N)


def is_shared(tags: PageTags, pages: Tensor) -> Tensor:
    """Which pages are written no more."""
    return _states(tags, pages) == State.SHARED


def free_all(tags: PageTags, first_generation: int) -> None:
    """Whatever they were."""
    tags.states_P.fill_(State.FREE)
    pages = torch.arange(tags.num_pages, device=tags.states_P.device)
    granted = twins.generations(first_generation, len(pages), pages.device)
    twins.put_tags(tags, pages, torch.stack((granted, torch.zeros_like(granted), granted * 0 + FREE_INDEX), 1))


def check_untouched(arrays: PageArrays, pages: Tensor, subject: Subject, indices: Tensor | int) -> None:
    """No transfer writes to pages that are handed out now.

    One is touched if a transfer that was announced for a former holder may still write there, or if a tag has landed
    since its release.
    """
    tags = arrays.tags
    found, records = twins.found_words(tags, pages), read(tags.records_P3, pages, 0)
    is_free = (records[:, 2] & PLACE_MASK) == FREE_INDEX
    is_own = found[Word.FOUND_SEAL] == twins.record_seals(records)
    is_spoiled = found[Word.FOUND_SEAL] == SPOILED  # a token was stored there, and is written over
    is_touched = (_states(tags, pages) == State.FREE) & ~is_spoiled & ~(is_free & is_own)
    is_touched |= read(arrays.dirty_P, pages, False)
    words = {Word.STEP: subject.step, Word.CHECK: Check.LANDING, Word.ROW: subject.rows, Word.INDEX: indices}
    twins.append_lines(arrays.ring, is_touched, words | found)
    put(arrays.touched_P, pages, is_touched)


def check_over(arrays: PageArrays, pages: Tensor, subject: Subject) -> None:
    """No transfer may write to pages that are released; where one may, nobody can trust them until it is drained."""
    is_awaiting = _states(arrays.tags, pages) == State.AWAITING
    words = {Word.STEP: subject.step, Word.CHECK: Check.LANDING, Word.ROW: subject.rows}
    twins.append_lines(arrays.ring, is_awaiting, words | twins.found_words(arrays.tags, pages))
    put(arrays.dirty_P, pages, True, is_awaiting)


def spoil_touched(arrays: PageArrays, pages: Tensor) -> None:
    """Where a late transfer may write nobody passes: not whoever was told, nor who shares the page with him later."""
    spoil(arrays.tags, pages, read(arrays.touched_P, pages, False))


def await_pages(tags: PageTags, pages: Tensor) -> None:
    """Pages are held and a transfer will write there: nobody reads them before. What is wrong already stays so."""
    is_whole = twins.found_words(tags, pages)[Word.FOUND_SEAL] == twins.record_seals(read(tags.records_P3, pages, 0))
    is_held = _states(tags, pages) == State.HELD
    put(tags.seals_P, pages, twins.mark_of(pages) ^ UNARRIVED, is_held & is_whole)
    put(tags.states_P, pages, State.AWAITING, is_held)


def drain(arrays: PageArrays, pages: Tensor) -> None:
    """Nothing is on its way to pages any more. Where nothing has come their holder may fill them himself."""
    tags = arrays.tags
    marks = twins.mark_of(pages)
    is_empty = read(tags.seals_P, pages, 0) ^ marks == UNARRIVED
    put(tags.seals_P, pages, twins.record_seals(read(tags.records_P3, pages, 0)) ^ marks, is_empty)
    set_states(tags, pages, of=State.AWAITING, to=State.HELD)
    put(arrays.dirty_P, pages, False)


def reserve_pages(arrays: PageArrays, pages: Tensor, subject: Subject) -> None:
    """Free pages are taken for no row; one that is held is a violation. Their tags are those that will land.

    Who held one reads nothing there any more, as it will be overwritten.
    """
    check_untouched(arrays, pages, subject, 0)
    is_held = _states(arrays.tags, pages) != State.FREE
    words = {Word.STEP: subject.step, Word.CHECK: Check.GRANT, Word.ROW: subject.rows}
    twins.append_lines(arrays.ring, is_held, words | twins.found_words(arrays.tags, pages))
    put(arrays.tags.states_P, pages, State.AWAITING)
    put(arrays.tags.seals_P, pages, twins.mark_of(pages) ^ UNARRIVED)


def held_by(expectations: Expectations, rows: Tensor, indices: Tensor) -> Held:
    """What rows were granted, copied; where they were granted nothing, what no page has.

    Details of a former request may still stand there.
    """
    places = places_of(expectations, rows, indices)
    is_granted = ~twins.is_nothing(read(expectations.seals_RL.view(-1), places, NEVER))
    details = torch.where(is_granted[:, None], read(expectations.details_RL2.view(-1, 2), places, 0), 0)
    return Held(generations=details[:, 0], owners=details[:, 1], indices=indices.clone())


def expect(expectations: Expectations, rows: Tensor, indices: Tensor, held: Held) -> None:
    """Logical pages of rows are what was held."""
    places = places_of(expectations, rows, indices)
    put(expectations.seals_RL.view(-1), places, twins.seal_of(held.generations, held.owners, indices))
    put(expectations.details_RL2.view(-1, 2), places, torch.stack((held.generations, held.owners), 1))


def forget(expectations: Expectations, rows: Tensor, which_NL: Tensor, instead: int) -> None:
    """Logical pages of rows are expected no more."""
    put(expectations.seals_RL, rows, torch.where(which_NL, instead, read(expectations.seals_RL, rows, NEVER)))


def wire_tags(tags: PageTags, pages: Tensor, checksums: Tensor | None) -> Tensor:
    """Seal and record of pages, int64 [N, 4]; a checksum is put above the index."""
    records = read(tags.records_P3, pages, 0)
    if checksums is not None:
        records[:, 2] = (records[:, 2] & PLACE_MASK) | (checksums.long() << 32)
        put(tags.records_P3, pages, records)
    return torch.cat((read(tags.seals_P, pages, 0)[:, None], records), 1)


def land_tags(tags: PageTags, pages: Tensor, wire: Tensor) -> None:
    """As a transfer does it: what was there is gone, and the seal keeps the mark of the page that it left."""
    put(tags.seals_P, pages, wire[:, 0])
    put(tags.records_P3, pages, wire[:, 1:])


def read_again(captured: Captured, step: Step, size: PoolSize) -> None:
    """The pages that a step read are those that its rows name now, where nothing may write them while it runs."""
    index_1L = torch.arange(step.most_pages, device=step.table.device)[None]
    columns = (index_1L * size.page_size if step.by_token else index_1L).clamp(max=step.table.shape[1] - 1)
    rows = step.rows.long()
    entries = step.table[torch.where(twins.is_in(rows, len(step.table)), rows, 0)[:, None], columns].long()
    pages = entries // size.page_size if step.by_token else entries
    pages = torch.where((pages >= 0) & (pages < MOST_PAGES), pages, -2).to(torch.int32)
    there, seals = (one[: len(step.rows), : step.most_pages] for one in (captured.pages_BL, captured.seals_BL))
    is_read = there != -1  # nothing of a row that the table does not have
    there.copy_(torch.where(is_read, pages, there))
    if step.by_token:
        seals.copy_(torch.where(is_read & (entries % size.page_size != 0), SHIFTED, seals))


def accept_arrived(arrays: PageArrays, pages: Tensor, held: Held, checksums: Tensor | None, subject: Subject) -> None:
    """Owner and index of what landed are those of the pages that were granted for it; generations are local.

    A whole tag bears the mark of some page. One that is exactly what was granted here, or was announced, has not been
    overwritten: the transfer has not landed. A checksum is compared with that of the tag. What is right becomes ours:
    its own generation and mark, the checksum stays. What is wrong is left as it is, and fails every check from here on.
    """
    tags = arrays.tags
    records = read(tags.records_P3, pages, 0)
    seals = twins.seal_of(held.generations, held.owners, held.indices)
    found = twins.found_words(tags, pages)
    came_from = twins.unmix(read(tags.seals_P, pages, 0) ^ twins.record_seals(records)) - MARK
    is_whole = (came_from >= 0) & (came_from < MOST_PAGES)
    is_same = (records[:, 1] == held.owners) & ((records[:, 2] & PLACE_MASK) == held.indices)
    is_held = _states(tags, pages) > State.FREE
    is_other = (found[Word.FOUND_SEAL] != seals) & (found[Word.FOUND_SEAL] != UNARRIVED)
    has_come = is_held & is_whole & is_same & is_other
    words = _holder_words(held, seals, subject) | found
    twins.append_lines(arrays.ring, ~has_come, words | {Word.CHECK: Check.ARRIVAL})
    sent = (records[:, 2] >> 32) & PLACE_MASK
    is_right = has_come if checksums is None else has_come & (sent == checksums.long() & PLACE_MASK)
    if checksums is not None:
        words |= {Word.CHECK: Check.CONTENT, Word.DETAIL: checksums.long()}
        twins.append_lines(arrays.ring, has_come & ~is_right, words)
    ours = torch.stack((held.generations, held.owners, held.indices | (records[:, 2] & ~PLACE_MASK)), 1)
    put(tags.records_P3, pages, ours, is_right)
    put(tags.seals_P, pages, seals ^ twins.mark_of(pages), is_right)
    spoil_touched(arrays, pages)


def own_pages(arrays: PageArrays, row: int, first: int, pages: Tensor) -> Tensor:
    """Of a row's places from ``first`` on that are named ``pages``, which pages are theirs: int64 [N], -1 for none.

    The page that is named, if it is what is expected; else whichever is; else, again, the one that is named, if it is
    held and its tag is expected by no row: what lies there was written over it. One that waits for a transfer is whose
    it was when that was announced.
    """
    tags, expected = arrays.tags, arrays.expectations
    indices = torch.arange(first, first + len(pages), device=pages.device)
    seals = read(expected.seals_RL.view(-1), places_of(expected, torch.full_like(indices, row), indices), NEVER)
    unmarked = tags.seals_P ^ twins.mark_of(torch.arange(tags.num_pages, device=pages.device))
    unmarked = torch.where(unmarked == UNARRIVED, twins.record_seals(tags.records_P3), unmarked)
    ordered, order = unmarked.sort()
    at = torch.searchsorted(ordered, seals).clamp(max=tags.num_pages - 1)
    is_granted = ~twins.is_nothing(seals)
    is_somewhere = is_granted & (ordered[at] == seals) & (tags.states_P[order[at]] != State.FREE)
    is_inside = twins.is_in(pages, tags.num_pages)
    named = torch.where(is_inside, pages, 0)
    is_expected = torch.isin(unmarked[named], expected.seals_RL)
    states = tags.states_P[named]
    is_nobodys = is_granted & ((states == State.HELD) | (states == State.AWAITING)) & ~is_expected
    elsewhere = torch.where(is_somewhere, order[at], torch.where(is_inside & is_nobodys, pages, -1))
    return torch.where(is_granted & is_inside & (unmarked[named] == seals), pages, elsewhere)


def _holder_words(held: Held, seals: Tensor, subject: Subject) -> dict[Word, Tensor | int]:
    return {
        Word.STEP: subject.step,
        Word.ROW: subject.rows,
        Word.INDEX: held.indices,
        Word.EXPECTED_SEAL: seals,
        Word.EXPECTED_GENERATION: held.generations,
        Word.EXPECTED_OWNER: held.owners,
    }
