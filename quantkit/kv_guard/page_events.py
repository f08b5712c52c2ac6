"""Rarer events of a page's life, in torch operations that wait for no device; the frequent ones are kernels.

A page that the pool does not have is a violation where somebody says that he holds it, or is given it; elsewhere it is
passed over. Those of a transfer are in `transfer_events.py`.
"""

import torch
from torch import Tensor

from quantkit.kv_guard.dispatch import (
    FREE_INDEX,
    HOLE,
    MOST_PAGES,
    NEVER,
    PRUNED,
    SHIFTED,
    SPOILED,
    UNGRANTED,
    Captured,
    Check,
    Expectations,
    PageTags,
    State,
    Word,
    twins,
)
from quantkit.kv_guard.page_arrays import PageArrays, Words, places_of, put, read, states_of
from quantkit.kv_guard.settings import PoolSize
from quantkit.kv_guard.tracker import Held, Step


def subject(expectations: Expectations, rows: Tensor | int, step: int) -> Words:
    """Of whom a line speaks: rows [N] as they are open now, or -1 where a node of a cache is the holder."""
    opening = twins.opening_word(expectations, rows) if isinstance(rows, Tensor) else {Word.OPENING: 0}
    return {Word.STEP: step, Word.ROW: rows} | opening


def holder_words(held: Held, seals: Tensor, of: Words) -> Words:
    """What somebody says that he holds."""
    return of | {
        Word.INDEX: held.indices,
        Word.EXPECTED_SEAL: seals,
        Word.EXPECTED_GENERATION: held.generations,
        Word.EXPECTED_OWNER: held.owners,
    }


def check_holder(arrays: PageArrays, pages: Tensor, held: Held, of: Words) -> Tensor:
    """Whoever passes pages on must hold them: what lies there is what was granted. Bool [N]: it is so."""
    seals = twins.seal_of(held.generations, held.owners, held.indices)
    found = twins.found_words(arrays.tags, pages)
    is_other = (found[Word.FOUND_SEAL] != seals) | (states_of(arrays.tags, pages) == State.FREE)
    is_other |= _is_nothing(held)  # whose seal may be what is found outside the pool
    twins.append_lines(arrays.ring, is_other, holder_words(held, seals, of) | found | {Word.CHECK: Check.HOLDER})
    return ~is_other


def name_both(arrays: PageArrays, row: int, openings: tuple[int, int], step: int) -> None:
    """A row was opened while it was another request's: a line for each of the two."""
    both = torch.tensor(openings, device=arrays.ring.count_1.device)
    words: Words = {Word.STEP: step, Word.CHECK: Check.OPENING, Word.ROW: row, Word.PAGE: -1, Word.OPENING: both}
    twins.append_lines(arrays.ring, torch.ones_like(both, dtype=torch.bool), words)


def leave_holes(expectations: Expectations, rows: Tensor, indices: Tensor, where_N: Tensor) -> None:
    """What rows were granted there is not filled with what is theirs."""
    put(expectations.seals_RL.view(-1), places_of(expectations, rows, indices), HOLE, where_N)


def share_pages(tags: PageTags, pages: Tensor, which_N: Tensor) -> None:
    """Those that are held are written no more from here on; what else lies there stays what it is, a transfer's too."""
    put(tags.states_P, pages, State.SHARED, which_N)


def spoil(tags: PageTags, pages: Tensor, which_N: Tensor) -> None:
    """Nobody passes there who reads them, now or later."""
    put(tags.seals_P, pages, twins.mark_of(pages) ^ SPOILED, which_N)


def is_shared(tags: PageTags, pages: Tensor) -> Tensor:
    """Which pages are written no more."""
    return states_of(tags, pages) == State.SHARED


def every_page(tags: PageTags) -> Tensor:
    """Of a pool."""
    return torch.arange(tags.num_pages, device=tags.states_P.device)


def free_all(tags: PageTags, first_generation: int) -> None:
    """Whatever they were."""
    tags.states_P.fill_(State.FREE)
    pages = every_page(tags)
    granted = twins.generations(first_generation, len(pages), pages.device)
    twins.put_tags(tags, pages, torch.stack((granted, torch.zeros_like(granted), granted * 0 + FREE_INDEX), 1))


def held_by(expectations: Expectations, rows: Tensor, indices: Tensor) -> Held:
    """What rows were granted, copied; where they were granted nothing, what no page has.

    Details of a former request may still stand there.
    """
    places = places_of(expectations, rows, indices)
    is_granted = ~twins.is_nothing(read(expectations.seals_RL.view(-1), places, NEVER))
    details = torch.where(is_granted[:, None], read(expectations.details_RL2.view(-1, 2), places, 0), 0)
    return Held(generations=details[:, 0], owners=details[:, 1], indices=indices.clone())


def _is_nothing(held: Held) -> Tensor:
    """What `held_by` returns where nothing was granted. An owner without a generation is a grant that no page has."""
    return (held.generations == 0) & (held.owners == 0)


def expect(expectations: Expectations, rows: Tensor, indices: Tensor, held: Held) -> None:
    """Logical pages of rows are what was held; where that was nothing, they were not granted."""
    places = places_of(expectations, rows, indices)
    seals = twins.seal_of(held.generations, held.owners, indices)
    put(expectations.seals_RL.view(-1), places, torch.where(_is_nothing(held), UNGRANTED, seals))
    put(expectations.details_RL2.view(-1, 2), places, torch.stack((held.generations, held.owners), 1))


def truncate(expectations: Expectations, rows: Tensor, num_pages: Tensor) -> None:
    """Rows keep their first pages."""
    indices = torch.arange(expectations.seals_RL.shape[1], device=rows.device)
    _forget(expectations, rows, indices >= num_pages[:, None], UNGRANTED)


def prune(expectations: Expectations, rows: Tensor, firsts: Tensor) -> None:
    """Rows keep their pages from the first on."""
    indices = torch.arange(expectations.seals_RL.shape[1], device=rows.device)
    _forget(expectations, rows, indices < firsts[:, None], PRUNED)


def _forget(expectations: Expectations, rows: Tensor, which_NL: Tensor, instead: int) -> None:
    """Logical pages of rows are expected no more. One that is named twice forgets what either entry says; one that is
    not open was granted nothing."""
    is_same = (rows[:, None] == rows[None]).to(torch.float32)
    which = is_same @ which_NL.to(torch.float32) > 0
    seals = read(expectations.seals_RL, rows, NEVER)
    put(expectations.seals_RL, rows, torch.where(which & (seals != NEVER), instead, seals))


def read_again(captured: Captured, step: Step, size: PoolSize) -> None:
    """The pages that a step read are those that its rows name now, where nothing may write them while it runs."""
    pages, is_shifted = twins.pages_of_table(
        step.table, step.rows.long(), step.most_pages, size.page_size, by_token=step.by_token
    )
    pages = torch.where((pages >= 0) & (pages < MOST_PAGES), pages, -2).to(torch.int32)
    there, seals = (one[: len(step.rows), : step.most_pages] for one in (captured.pages_BL, captured.seals_BL))
    is_read = there != -1  # nothing of a row that the table does not have
    there.copy_(torch.where(is_read, pages, there))
    seals.copy_(torch.where(is_read & is_shifted, SHIFTED, seals))
