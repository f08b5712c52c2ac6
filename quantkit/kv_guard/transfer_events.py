"""What becomes of pages that a transfer writes beside the stream: announced, landed, arrived, or given up.

Each announcement has a number, which its caller gives: pages wait for it, and where their holder is gone before it is
over, it is counted until somebody says that it is (`PageArrays.gone_P`). Nothing here waits for the device.
"""

import torch
from torch import Tensor

from quantkit.kv_guard.dispatch import (
    FREE_INDEX,
    MARK,
    MOST_PAGES,
    PLACE_MASK,
    SPOILED,
    UNARRIVED,
    Check,
    PageTags,
    State,
    Word,
    twins,
)
from quantkit.kv_guard.page_arrays import NO_TRANSFER, PageArrays, Words, put, read, states_of
from quantkit.kv_guard.page_events import holder_words, spoil
from quantkit.kv_guard.tracker import Held


def is_waiting(tags: PageTags, pages: Tensor) -> Tensor:
    """For which pages a transfer was announced that is not over."""
    return states_of(tags, pages) >= State.AWAITING


def check_untouched(arrays: PageArrays, pages: Tensor, of: Words) -> None:
    """No transfer writes to pages that are handed out now; not even to one that waits, and is handed out all the same.

    One is touched if a transfer that was announced for a former holder may still write there, or if a tag has landed
    since its release.
    """
    tags = arrays.tags
    count_gone(arrays, pages)
    found, records = twins.found_words(tags, pages), read(tags.records_P3, pages, 0)
    is_free = (records[:, 2] & PLACE_MASK) == FREE_INDEX
    is_own = found[Word.FOUND_SEAL] == twins.record_seals(records)
    is_spoiled = found[Word.FOUND_SEAL] == SPOILED  # a token was stored there, and is written over
    is_touched = (states_of(tags, pages) == State.FREE) & ~is_spoiled & ~(is_free & is_own)
    is_touched |= read(arrays.gone_P, pages, 0) > 0
    twins.append_lines(arrays.ring, is_touched, of | found | {Word.CHECK: Check.LANDING})
    put(arrays.touched_P, pages, is_touched)


def check_over(arrays: PageArrays, pages: Tensor, of: Words) -> None:
    """No transfer may write to pages that are released; where one may, nobody can trust them until it is drained."""
    is_awaiting = is_waiting(arrays.tags, pages)
    words = of | twins.found_words(arrays.tags, pages) | {Word.CHECK: Check.LANDING}
    twins.append_lines(arrays.ring, is_awaiting, words)
    count_gone(arrays, pages)
    put(arrays.granted_P, pages, 0)


def count_gone(arrays: PageArrays, pages: Tensor) -> None:
    """What pages wait for is not over, and they wait no more."""
    put(arrays.gone_P, pages, read(arrays.gone_P, pages, 0) + 1, is_waiting(arrays.tags, pages))


def take_over(arrays: PageArrays, pages: Tensor, granted: Tensor) -> None:
    """Pages were granted, under these generations. Where a late transfer may write nobody passes: not whoever was told,
    nor who shares the page with him later."""
    put(arrays.granted_P, pages, granted)
    spoil(arrays.tags, pages, read(arrays.touched_P, pages, False))


def await_pages(arrays: PageArrays, pages: Tensor, transfer: int, of: Words) -> None:
    """A transfer will write to pages that are held: nobody reads them before. What else is announced is a violation.

    What an earlier transfer has left there, which was given up, is no more than what lay there before it. Where
    somebody stored a token wrongly it stays so until the content has come. A transfer that was announced wrongly may
    write all the same: who shares the page reads it no more, who waits there for another cannot trust what comes, and
    no later holder may until it is drained.
    """
    tags = arrays.tags
    states, found = states_of(tags, pages), twins.found_words(tags, pages)
    is_held, is_again = states == State.HELD, twins.is_repeated(pages)
    words = of | found | {Word.CHECK: Check.ANNOUNCEMENT, Word.DETAIL: states}
    twins.append_lines(arrays.ring, ~is_held | is_again, words)
    put(arrays.gone_P, pages, read(arrays.gone_P, pages, 0) + 1, ~is_held & ~is_again)
    put(arrays.touched_P, pages, True, states >= State.AWAITING)
    spoil(tags, pages, states == State.SHARED)
    put(tags.seals_P, pages, twins.mark_of(pages) ^ UNARRIVED, is_held & (found[Word.FOUND_SEAL] != SPOILED))
    put(tags.states_P, pages, State.AWAITING, is_held)
    put(arrays.transfers_P, pages, transfer, is_held)


def drain(arrays: PageArrays, pages: Tensor, transfer: int) -> None:
    """Nothing of a transfer is on its way to pages any more. Where nothing has come their holder may fill them himself.

    A page that does not wait for it was given up with it before.
    """
    tags = arrays.tags
    is_over = is_waiting(tags, pages) & (read(arrays.transfers_P, pages, NO_TRANSFER) == transfer)
    put(arrays.gone_P, pages, (read(arrays.gone_P, pages, 0) - 1).clamp(min=0), ~is_over)
    marks, states = twins.mark_of(pages), states_of(tags, pages)
    is_empty = (read(tags.seals_P, pages, 0) ^ marks == UNARRIVED) & (states != State.RESERVED)
    put(tags.seals_P, pages, twins.record_seals(read(tags.records_P3, pages, 0)) ^ marks, is_over & is_empty)
    settle_pages(arrays, pages, State.HELD, is_over)


def settle_pages(arrays: PageArrays, pages: Tensor, state: State, which_N: Tensor) -> None:
    """Pages wait no more. Where a token was stored meanwhile, or another transfer may write, they are spoiled."""
    states = states_of(arrays.tags, pages)
    spoil(arrays.tags, pages, which_N & ((states == State.STRUCK) | read(arrays.touched_P, pages, False)))
    put(arrays.tags.states_P, pages, state, which_N & (states >= State.AWAITING))


def reserve_pages(arrays: PageArrays, pages: Tensor, transfer: int, of: Words) -> None:
    """Free pages are taken for no row; one that is held is a violation. Their tags are those that will land.

    Who held one reads nothing there any more, as it will be overwritten.
    """
    tags = arrays.tags
    check_untouched(arrays, pages, of)
    is_held = (states_of(tags, pages) != State.FREE) | twins.is_repeated(pages)
    twins.append_lines(arrays.ring, is_held, of | twins.found_words(tags, pages) | {Word.CHECK: Check.GRANT})
    put(tags.states_P, pages, State.RESERVED)
    put(tags.seals_P, pages, twins.mark_of(pages) ^ UNARRIVED)
    put(arrays.transfers_P, pages, transfer)
    put(arrays.granted_P, pages, 0)


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


def accept_arrived(
    arrays: PageArrays, pages: Tensor, held: Held, checksums: Tensor | None, of: Words, *, state: State
) -> None:
    """Owner and index of what landed are those of the pages that were granted for it; generations are local.

    A whole tag bears the mark of some page. One that is exactly what was granted here, or was announced, has not been
    overwritten: the transfer has not landed. A checksum is compared with that of the tag. What is right becomes ours:
    its own generation and mark, the checksum stays. What is wrong is left as it is, and fails every check from here on;
    so is a page where a token was stored meanwhile. Pages wait no more, and are in ``state`` behind that.
    """
    tags = arrays.tags
    spoil(tags, pages, states_of(tags, pages) == State.STRUCK)
    records = read(tags.records_P3, pages, 0)
    seals = twins.seal_of(held.generations, held.owners, held.indices)
    found = twins.found_words(tags, pages)
    came_from = twins.unmix(read(tags.seals_P, pages, 0) ^ twins.record_seals(records)) - MARK
    is_whole = (came_from >= 0) & (came_from < MOST_PAGES)
    is_same = (records[:, 1] == held.owners) & ((records[:, 2] & PLACE_MASK) == held.indices)
    is_held = states_of(tags, pages) > State.FREE
    is_other = (found[Word.FOUND_SEAL] != seals) & (found[Word.FOUND_SEAL] != UNARRIVED)
    has_come = is_held & is_whole & is_same & is_other
    words = holder_words(held, seals, of) | found
    twins.append_lines(arrays.ring, ~has_come, words | {Word.CHECK: Check.ARRIVAL})
    sent = (records[:, 2] >> 32) & PLACE_MASK
    is_right = has_come if checksums is None else has_come & (sent == checksums.long() & PLACE_MASK)
    if checksums is not None:
        words |= {Word.CHECK: Check.CONTENT, Word.DETAIL: checksums.long()}
        twins.append_lines(arrays.ring, has_come & ~is_right, words)
    ours = torch.stack((held.generations, held.owners, held.indices | (records[:, 2] & ~PLACE_MASK)), 1)
    put(tags.records_P3, pages, ours, is_right)
    put(tags.seals_P, pages, seals ^ twins.mark_of(pages), is_right)
    settle_pages(arrays, pages, state, torch.ones_like(is_right))
