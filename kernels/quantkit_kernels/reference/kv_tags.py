"""Tags of KV pages in plain torch: the ops that kernels have too. What a seal is says kv_seals.py.

On a GPU `grant_pages`, `release_pages` and `check_writes` wait for it, for which a guard has kernels; nothing else.

Pages, rows, indices and owners are int64 [N]. Nothing outside of the arrays is read or written: a page that the pool
does not have is a violation, as is each of a row that the table does not have; other rows and indices expect nothing.
"""

from typing import Any

import torch
from torch import Tensor

from quantkit_kernels.kv_tag_arrays import (
    BEYOND,
    FREE_INDEX,
    HOLE,
    NEVER,
    PRUNED,
    SHIFTED,
    SPOILED,
    Captured,
    Check,
    Expectations,
    PageTags,
    Ring,
    State,
    Word,
)
from quantkit_kernels.kv_tag_checks import (
    check_arrays,
    check_page_size,
    check_room,
    check_table,
    check_tags,
    vectors,
)
from quantkit_kernels.reference.kv_seals import generations, is_nothing, mark_of, mix, record_seals, seal_of, unmix
from quantkit_kernels.reference.kv_tag_lines import (
    append_lines,
    expected_words,
    found_words,
    is_in,
    is_place,
    opening_word,
)

__all__ = [
    "append_lines",
    "check_captured",
    "check_pages",
    "check_writes",
    "found_words",
    "generations",
    "grant_pages",
    "is_in",
    "is_nothing",
    "is_repeated",
    "mark_of",
    "mix",
    "opening_word",
    "pages_of_table",
    "put_tags",
    "record_seals",
    "release_pages",
    "seal_of",
    "unmix",
]


def _longs(**given: Tensor) -> list[Tensor]:
    return [vector.long() for vector in vectors(**given)]


def put_tags(tags: PageTags, pages_N: Tensor, records_N3: Tensor) -> None:
    """Write records and their seals."""
    tags.records_P3.index_put_((pages_N,), records_N3)
    tags.seals_P.index_put_((pages_N,), record_seals(records_N3) ^ mark_of(pages_N))


def is_repeated(pages_N: Tensor) -> Tensor:
    """Entries whose page stands before them in the list."""
    order = torch.argsort(pages_N, stable=True)
    ordered = pages_N[order]
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[1:] = ordered[1:] == ordered[:-1]
    return torch.empty_like(again).index_put_((order,), again)


def grant_pages(
    tags: PageTags,
    expectations: Expectations,
    ring: Ring,
    pages: Tensor,
    rows: Tensor,
    indices: Tensor,
    owners: Tensor,
    *,
    first_generation: int,
    step: int,
) -> None:
    """Seal free pages for logical pages of rows, and let the rows expect that. A page that is held is a violation.

    Of a page that is named twice the tag of an entry stays that is one: each row that has the page is then named.
    """
    pages, rows, indices, owners = _longs(pages=pages, rows=rows, indices=indices, owners=owners)
    check_arrays(tags, expectations, ring, pages)
    granted = generations(first_generation, len(pages), pages.device)
    words: dict[Word, Tensor | int] = {Word.CHECK: Check.GRANT, Word.STEP: step, Word.ROW: rows, Word.INDEX: indices}
    words |= opening_word(expectations, rows)
    inside = _reseal(tags, ring, pages, torch.stack((granted, owners, indices), 1), State.HELD, words)
    known = inside[is_place(expectations, rows, indices)[inside]]
    expect(expectations, rows[known], indices[known], granted[known], owners[known])


def _expected(expectations: Expectations, rows: Tensor, indices: Tensor) -> Tensor:
    """Seals; NEVER where there is no such place."""
    is_known = is_place(expectations, rows, indices)
    at = torch.where(is_known, rows, 0), torch.where(is_known, indices, 0)
    return torch.where(is_known, expectations.seals_RL[at], NEVER)


def expect(expectations: Expectations, rows: Tensor, indices: Tensor, granted: Tensor, owners: Tensor) -> None:
    """Let logical pages of rows expect pages that were granted as ``granted`` to ``owners``."""
    expectations.seals_RL.index_put_((rows, indices), seal_of(granted, owners, indices))
    expectations.details_RL2.index_put_((rows, indices), torch.stack((granted, owners), 1))


def release_pages(tags: PageTags, ring: Ring, pages: Tensor, *, first_generation: int, step: int) -> None:
    """Seal pages as free, under new generations. A page that is free already, or named twice, is a violation."""
    (pages,) = _longs(pages=pages)
    check_tags(tags, ring, pages)
    granted = generations(first_generation, len(pages), pages.device)
    records = torch.stack((granted, torch.zeros_like(granted), torch.full_like(granted, FREE_INDEX)), 1)
    _reseal(tags, ring, pages, records, State.FREE, {Word.CHECK: Check.RELEASE, Word.STEP: step, Word.ROW: -1})


def _reseal(
    tags: PageTags, ring: Ring, pages: Tensor, records: Tensor, state: State, words: dict[Word, Tensor | int]
) -> Tensor:
    """Give pages a state; one that is in it already is a violation. Which entries name a page of the pool."""
    inside = is_in(pages, tags.num_pages).nonzero()[:, 0]
    known = pages[inside]
    is_bad = torch.ones_like(pages, dtype=torch.bool)
    is_bad[inside] = ((tags.states_P[known] != State.FREE) == (state is not State.FREE)) | is_repeated(known)
    append_lines(ring, is_bad, words | found_words(tags, pages))
    put_tags(tags, known, records[inside])
    tags.states_P.index_fill_(0, known, state)
    return inside


def check_pages(
    tags: PageTags,
    expectations: Expectations,
    ring: Ring,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    firsts: Tensor | None = None,
    *,
    page_size: int,
    by_token: bool,
    most_pages: int,
    step: int,
    null_page: int = -1,
    captured: Captured | None = None,
) -> None:
    """Before a step: is every page that the batch will read the one that its row was granted?

    ``table`` int32 or int64 [rows, entries] has an entry a page, or (``by_token``) the slot of each token; ``rows`` [B]
    are rows of it and of the expectations, ``lengths`` [B] tokens, ``firsts`` [B] the first page that is read: the last
    one at the latest. A row that has more than ``most_pages`` is a violation. The slot of a page's first token is the
    page's first. The engine's ``null_page`` stands in rows that are not open and, without ``firsts``, where a window
    has left a row's pages. What was read is left in ``captured`` for `check_captured`.
    """
    batch = {"rows": rows, "lengths": lengths} | ({} if firsts is None else {"firsts": firsts})
    rows, lengths, *_ = _longs(**batch)
    check_arrays(tags, expectations, ring, rows)
    check_page_size(page_size)
    check_table(table, rows)
    if captured is not None:
        check_room(captured, len(rows), most_pages, rows)
    index_1L = torch.arange(most_pages, device=table.device)[None]
    last_B1 = (lengths[:, None] - 1) // page_size
    is_read = index_1L <= last_B1
    if firsts is not None:
        is_read &= index_1L >= torch.minimum(firsts[:, None], last_B1)
    is_short = (index_1L == most_pages - 1) & (index_1L < last_B1)
    is_read |= is_short
    rows_B1 = rows[:, None]
    is_listed = is_in(rows_B1, len(table))
    pages, is_shifted = pages_of_table(table, rows, most_pages, page_size, by_token=by_token)
    seals = torch.where(is_read, _expected(expectations, rows_B1, index_1L), NEVER)
    is_padding = (seals == NEVER) | ((seals == PRUNED) & (firsts is None) & ~is_short)
    is_read &= (pages != null_page) | ~is_padding | ~is_listed
    seals = torch.where(is_read & is_shifted, SHIFTED, seals)
    seals = torch.where(is_read & is_short, BEYOND, seals)
    openings = opening_word(expectations, rows)[Word.OPENING]
    if captured is not None and most_pages:
        captured.pages_BL[: len(rows), :most_pages] = torch.where(is_read, pages, -1).to(torch.int32)
        captured.seals_BL[: len(rows), :most_pages] = seals
        captured.openings_B[: len(rows)] = openings
    words = {Word.STEP: step, Word.CHECK: Check.BEFORE_STEP, Word.OPENING: openings}
    _judge(tags, expectations, ring, rows_B1, pages, seals, is_read, words)


def pages_of_table(
    table: Tensor, rows: Tensor, most_pages: int, page_size: int, *, by_token: bool
) -> tuple[Tensor, Tensor]:
    """Pages that rows name, int64 [B, L], -1 of rows that the table does not have; and which of them are shifted."""
    index_1L = torch.arange(most_pages, device=table.device)[None]
    columns = (index_1L * page_size if by_token else index_1L).clamp(max=table.shape[1] - 1)
    is_listed = is_in(rows, len(table))[:, None]
    entries = torch.where(is_listed, table[torch.where(is_listed, rows[:, None], 0), columns].long(), -1)
    pages = entries // page_size if by_token else entries
    return pages, (entries != pages * page_size) & by_token


def check_captured(
    tags: PageTags,
    expectations: Expectations,
    ring: Ring,
    captured: Captured,
    rows: Tensor,
    *,
    most_pages: int,
    step: int,
) -> None:
    """After a step: are the pages that it read still what they were at its launch?"""
    (rows,) = _longs(rows=rows)
    check_arrays(tags, expectations, ring, rows)
    check_room(captured, len(rows), most_pages, rows)
    pages = captured.pages_BL[: len(rows), :most_pages].long()
    seals = captured.seals_BL[: len(rows), :most_pages]
    openings = captured.openings_B[: len(rows)]
    words = {Word.STEP: step, Word.CHECK: Check.AFTER_STEP, Word.OPENING: openings}
    _judge(tags, expectations, ring, rows[:, None], pages, seals, pages != -1, words)


def _judge(
    tags: PageTags,
    expectations: Expectations,
    ring: Ring,
    rows_B1: Tensor,
    pages_BL: Tensor,
    seals_BL: Tensor,
    is_read_BL: Tensor,
    words: dict[Word, Any],
) -> None:
    """Compare seals; a page outside the pool, and one that was never granted, is wrong whatever lies there."""
    each = rows_B1, pages_BL, seals_BL, words[Word.OPENING][:, None]
    rows, pages, seals, openings = (one.expand_as(pages_BL).reshape(-1) for one in each)
    indices = torch.arange(pages_BL.shape[1], device=pages.device).repeat(len(pages_BL))
    found = found_words(tags, pages)
    is_bad = is_read_BL.reshape(-1) & ((found[Word.FOUND_SEAL] != seals) | is_nothing(seals))
    expected = expected_words(expectations, rows, indices, seals)
    append_lines(ring, is_bad, words | expected | found | {Word.OPENING: openings, Word.SLOT: -1})


def check_writes(
    tags: PageTags,
    expectations: Expectations,
    ring: Ring,
    slots: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    page_size: int,
    step: int,
    null_page: int = -1,
) -> None:
    """Does each token go to its own page, at its own place, and does no other row read there?

    ``slots``, ``rows`` and ``positions`` [N] of the tokens that a step stores. Below 0 is padding, and so is a token in
    ``null_page`` where its row was granted nothing. The step stores them all the same: a page where a token does not
    belong is spoiled, and fails for all who read it; no tag that lands there later makes it right. Where the token
    should be is a hole, which fails its row and whoever the row passes it on to.
    """
    slots, rows, positions = _longs(slots=slots, rows=rows, positions=positions)
    check_arrays(tags, expectations, ring, slots)
    check_page_size(page_size)
    pages, indices = slots // page_size, positions // page_size
    seals, found = _expected(expectations, rows, indices), found_words(tags, pages)
    is_stored = (slots >= 0) & ((pages != null_page) | ~is_nothing(seals))
    is_elsewhere = (found[Word.FOUND_SEAL] != seals) | (slots % page_size != positions % page_size)
    is_wrong = is_elsewhere | is_nothing(seals)
    is_wrong |= tags.states_P[torch.where(is_in(pages, tags.num_pages), pages, 0)] == State.SHARED
    words = expected_words(expectations, rows, indices, seals) | found | opening_word(expectations, rows)
    words |= {Word.STEP: step, Word.CHECK: Check.WRITE, Word.SLOT: slots, Word.DETAIL: positions}
    append_lines(ring, is_stored & is_wrong, words)
    is_hole = is_stored & is_elsewhere & ~is_nothing(seals)
    expectations.seals_RL.index_put_((rows[is_hole], indices[is_hole]), torch.tensor(HOLE, device=rows.device))
    spoiled = pages[is_stored & is_wrong & is_in(pages, tags.num_pages)]
    tags.seals_P.index_put_((spoiled,), mark_of(spoiled) ^ SPOILED)
    tags.states_P.index_fill_(0, spoiled[tags.states_P[spoiled] >= State.AWAITING], State.STRUCK)
