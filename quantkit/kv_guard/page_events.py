"""Rarer events of a page's life, in torch operations that wait for no device; the frequent ones are kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.kv_guard.dispatch import (
    FREE_INDEX,
    MARK,
    MOST_PAGES,
    PLACE_MASK,
    SPOILED,
    Captured,
    Check,
    Expectations,
    PageTags,
    Ring,
    State,
    Word,
    twins,
)
from quantkit.kv_guard.settings import PoolSize
from quantkit.kv_guard.tracker import Held, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Of whom a violation would speak: rows [N], or -1 where a node of a cache is the holder."""

    rows: Tensor | int
    step: int


@dataclass(slots=True, kw_only=True)
class Beside:
    """Of a pool into which transfers write. ``is_on`` from the first of them on: until then nothing is looked at."""

    dirty_P: Tensor  # bool: one may still write there, that was announced for a holder who is gone
    touched_P: Tensor  # bool: one might when the page was handed out, or had
    is_on: bool = False


def check_holder(tags: PageTags, ring: Ring, pages: Tensor, held: Held, line: Line) -> None:
    """Whoever passes pages on must hold them: what lies there is what was granted."""
    seals = twins.seal_of(held.generations, held.owners, held.indices)
    found = twins.found_words(tags, pages)
    is_other = (found[Word.FOUND_SEAL] != seals) | (tags.states_P[pages] == State.FREE)
    twins.append_lines(ring, is_other, _holder_words(held, seals, line) | found | {Word.CHECK: Check.HOLDER})


def share_pages(tags: PageTags, pages: Tensor) -> None:
    """Written no more from here on."""
    tags.states_P.index_fill_(0, pages, State.SHARED)


def free_all(tags: PageTags, first_generation: int) -> None:
    """Whatever they were."""
    tags.states_P.fill_(State.FREE)
    pages = torch.arange(tags.num_pages, device=tags.states_P.device)
    granted = twins.generations(first_generation, len(pages), pages.device)
    twins.put_tags(tags, pages, torch.stack((granted, torch.zeros_like(granted), granted * 0 + FREE_INDEX), 1))


def check_untouched(
    beside: Beside, tags: PageTags, ring: Ring, pages: Tensor, line: Line, indices: Tensor | int
) -> None:
    """No transfer writes to pages that are handed out now.

    One may be that was announced for a former holder; one is whose tag has landed since the release.
    """
    found = twins.found_words(tags, pages)
    is_free = (tags.records_P3[pages, 2] & PLACE_MASK) == FREE_INDEX
    is_own = found[Word.FOUND_SEAL] == twins.record_seals(tags.records_P3[pages])
    is_spoiled = found[Word.FOUND_SEAL] == SPOILED  # a token was stored there, and is written over
    is_touched = (tags.states_P[pages] == State.FREE) & ~is_spoiled & ~(is_free & is_own) | beside.dirty_P[pages]
    words = {Word.STEP: line.step, Word.CHECK: Check.LANDING, Word.ROW: line.rows, Word.INDEX: indices}
    twins.append_lines(ring, is_touched, words | found)
    beside.touched_P.index_put_((pages,), is_touched)


def set_states(tags: PageTags, pages: Tensor, *, of: State, to: State) -> None:
    """Of pages that are in a state."""
    states = tags.states_P[pages]
    tags.states_P.index_put_((pages,), torch.where(states == of, to, states))


def check_over(beside: Beside, tags: PageTags, ring: Ring, pages: Tensor, line: Line) -> None:
    """No transfer may write to pages that are released; where one may, nobody can trust them until it is drained."""
    is_awaiting = tags.states_P[pages] == State.AWAITING
    words = {Word.STEP: line.step, Word.CHECK: Check.LANDING, Word.ROW: line.rows}
    twins.append_lines(ring, is_awaiting, words | twins.found_words(tags, pages))
    beside.dirty_P.index_put_((pages,), beside.dirty_P[pages] | is_awaiting)


def spoil_touched(beside: Beside, tags: PageTags, pages: Tensor) -> None:
    """Where a late transfer may write nobody passes: not whoever was told, nor who shares the page with him later."""
    seals = torch.where(beside.touched_P[pages], twins.mark_of(pages) ^ SPOILED, tags.seals_P[pages])
    tags.seals_P.index_put_((pages,), seals)


def reserve_pages(beside: Beside, tags: PageTags, ring: Ring, pages: Tensor, line: Line) -> None:
    """Free pages are taken for no row; one that is held is a violation. Their tags are those that will land."""
    check_untouched(beside, tags, ring, pages, line, 0)
    is_held = tags.states_P[pages] != State.FREE
    words = {Word.STEP: line.step, Word.CHECK: Check.GRANT, Word.ROW: line.rows}
    twins.append_lines(ring, is_held, words | twins.found_words(tags, pages))
    tags.states_P.index_fill_(0, pages, State.AWAITING)


def held_by(expectations: Expectations, rows: Tensor, indices: Tensor) -> Held:
    """What rows were granted, copied; where they were granted nothing, what no page has.

    Details of a former request may still stand there.
    """
    is_granted = ~twins.is_nothing(expectations.seals_RL[rows, indices])
    details = torch.where(is_granted[:, None], expectations.details_RL2[rows, indices], 0)
    return Held(generations=details[:, 0], owners=details[:, 1], indices=indices.clone())


def wire_tags(tags: PageTags, pages: Tensor, checksums: Tensor | None) -> Tensor:
    """Seal and record of pages, int64 [N, 4]; a checksum is put above the index."""
    records = tags.records_P3[pages]
    if checksums is not None:
        records[:, 2] = (records[:, 2] & PLACE_MASK) | (checksums.long() << 32)
        tags.records_P3.index_put_((pages,), records)
    return torch.cat((tags.seals_P[pages][:, None], records), 1)


def land_tags(tags: PageTags, pages: Tensor, wire: Tensor) -> None:
    """As a transfer does it: what was there is gone, and the seal keeps the mark of the page that it left."""
    tags.seals_P.index_put_((pages,), wire[:, 0])
    tags.records_P3.index_put_((pages,), wire[:, 1:])


def read_again(captured: Captured, step: Step, size: PoolSize) -> None:
    """The pages that a step read are those that its rows name now, where nothing may write them while it runs."""
    index_1L = torch.arange(step.most_pages, device=step.table.device)[None]
    columns = (index_1L * size.page_size if step.by_token else index_1L).clamp(max=step.table.shape[1] - 1)
    entries = step.table[step.rows.long()[:, None], columns].long()
    pages = entries // size.page_size if step.by_token else entries
    pages = torch.where((pages >= 0) & (pages < MOST_PAGES), pages, -2).to(torch.int32)  # -1 is what was not read
    there = captured.pages_BL[: len(step.rows), : step.most_pages]
    there.copy_(torch.where(there == -1, there, pages))


def accept_arrived(
    tags: PageTags, ring: Ring, pages: Tensor, held: Held, checksums: Tensor | None, line: "Line"
) -> None:
    """Owner and index of what landed are those of the pages that were granted for it; generations are local.

    A whole tag bears the mark of some page. One that is exactly what was granted here has not been overwritten: the
    transfer has not landed. A checksum is compared with that of the tag. What is right becomes ours: its own generation
    and mark, the checksum stays. What is wrong is left as it is, and fails every check from here on.
    """
    records = tags.records_P3[pages]
    seals = twins.seal_of(held.generations, held.owners, held.indices)
    found = twins.found_words(tags, pages)
    came_from = twins.unmix(tags.seals_P[pages] ^ twins.record_seals(records)) - MARK
    is_whole = (came_from >= 0) & (came_from < MOST_PAGES)
    is_same = (records[:, 1] == held.owners) & ((records[:, 2] & PLACE_MASK) == held.indices)
    has_come = is_whole & is_same & (found[Word.FOUND_SEAL] != seals)
    words = _holder_words(held, seals, line) | found
    twins.append_lines(ring, ~has_come, words | {Word.CHECK: Check.ARRIVAL})
    sent = (records[:, 2] >> 32) & PLACE_MASK
    is_right = has_come if checksums is None else has_come & (sent == checksums.long())
    if checksums is not None:
        twins.append_lines(
            ring, has_come & ~is_right, words | {Word.CHECK: Check.CONTENT, Word.DETAIL: checksums.long()}
        )
    ours = torch.stack((held.generations, held.owners, held.indices | (records[:, 2] & ~PLACE_MASK)), 1)
    marked = seals ^ twins.mark_of(pages)
    tags.records_P3.index_put_((pages,), torch.where(is_right[:, None], ours, records))
    tags.seals_P.index_put_((pages,), torch.where(is_right, marked, tags.seals_P[pages]))


def own_pages(tags: PageTags, expectations: Expectations, seals: Tensor, pages: Tensor) -> Tensor:
    """Of places that expect ``seals`` and are named ``pages``, which pages are theirs: int64 [N], -1 where none is.

    The page that is named, if it is what is expected; else whichever is; else, again, the one that is named, if it is
    held and its tag is expected by no row: what lies there was written over it.
    """
    unmarked = tags.seals_P ^ twins.mark_of(torch.arange(tags.num_pages, device=pages.device))
    ordered, order = unmarked.sort()
    at = torch.searchsorted(ordered, seals).clamp(max=tags.num_pages - 1)
    is_granted = ~twins.is_nothing(seals)
    is_somewhere = is_granted & (ordered[at] == seals) & (tags.states_P[order[at]] != State.FREE)
    is_inside = (pages >= 0) & (pages < tags.num_pages)
    named = torch.where(is_inside, pages, 0)
    is_expected = torch.isin(unmarked[named], expectations.seals_RL)
    is_nobodys = is_granted & (tags.states_P[named] == State.HELD) & ~is_expected
    elsewhere = torch.where(is_somewhere, order[at], torch.where(is_inside & is_nobodys, pages, -1))
    return torch.where(is_granted & is_inside & (unmarked[named] == seals), pages, elsewhere)


def _holder_words(held: Held, seals: Tensor, line: "Line") -> dict[Word, Tensor | int]:
    return {
        Word.STEP: line.step,
        Word.ROW: line.rows,
        Word.INDEX: held.indices,
        Word.EXPECTED_SEAL: seals,
        Word.EXPECTED_GENERATION: held.generations,
        Word.EXPECTED_OWNER: held.owners,
    }
