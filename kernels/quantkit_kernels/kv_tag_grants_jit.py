"""The kernels behind kv_tags.grant_pages and release_pages: a thread seals one page."""

import triton
import triton.language as tl

from quantkit_kernels.kv_tag_arrays import FREE_INDEX, PLACE_MASK, Check, State
from quantkit_kernels.kv_tag_lines_jit import (
    SIZES,
    VECTORS,
    begin_lines,
    detail_at,
    mark_of,
    record_at,
    seal_of,
    write_expected,
    write_found,
)

_FREE, _HELD = tl.constexpr(int(State.FREE)), tl.constexpr(int(State.HELD))
_FREE_INDEX, _PLACE_MASK = tl.constexpr(FREE_INDEX), tl.constexpr(PLACE_MASK)
_GRANT, _RELEASE = tl.constexpr(int(Check.GRANT)), tl.constexpr(int(Check.RELEASE))


@triton.jit
def _generations(first, entry):  # type: ignore[no-untyped-def]
    """Numbers from ``first`` on, int64 as bits; 2^64 is followed by 1, as 0 means that nothing was granted."""
    first = first.to(tl.int64).to(tl.uint64)
    number = first + entry.to(tl.uint64)
    return (number + (number < first).to(tl.uint64)).to(tl.int64)


@triton.jit
def _found(seals_ptr, records_ptr, page, is_inside):  # type: ignore[no-untyped-def]
    """Seal and record of pages, zeros of those outside the pool."""
    records_ptr += record_at(page)
    seal = tl.load(seals_ptr + page, mask=is_inside, other=0) ^ mark_of(page)
    generation = tl.load(records_ptr, mask=is_inside, other=0)
    owner = tl.load(records_ptr + 1, mask=is_inside, other=0)
    return tl.where(is_inside, seal, 0), generation, owner, tl.load(records_ptr + 2, mask=is_inside, other=0)


@triton.jit
def _put(seals_ptr, records_ptr, page, mask, seal, generation, owner, index):  # type: ignore[no-untyped-def]
    records_ptr += record_at(page)
    tl.store(records_ptr, generation, mask=mask)
    tl.store(records_ptr + 1, owner, mask=mask)
    tl.store(records_ptr + 2, index, mask=mask)
    tl.store(seals_ptr + page, seal, mask=mask)


@triton.jit
def _exchange(  # type: ignore[no-untyped-def]
    seals_ptr, records_ptr, states_ptr, page, is_inside, seal, generation, owner, index, STATE: tl.constexpr
):
    """Seals pages; which of them were in another state until then.

    Of the entries that name one page a single one changes its state. The others seal the page behind it, a second time:
    the tag that stays is that of an entry which is a violation, so that no row passes which is not named.
    """
    seal ^= mark_of(page)
    _put(seals_ptr, records_ptr, page, is_inside, seal, generation, owner, index)
    tl.debug_barrier()  # each thread's exchange comes behind what all of the program stored
    state = tl.full(page.shape, STATE, tl.int32)
    former = tl.atomic_xchg(states_ptr + page, state, mask=is_inside, sem="acq_rel")
    is_again = is_inside & ((former != _FREE) == (STATE != _FREE))
    _put(seals_ptr, records_ptr, page, is_again, seal, generation, owner, index)
    return is_again


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=VECTORS)
def grant_kernel(  # type: ignore[no-untyped-def]
    seals_ptr,
    records_ptr,
    states_ptr,
    expected_ptr,
    details_ptr,
    openings_ptr,
    lines_ptr,
    count_ptr,
    pages_ptr,
    rows_ptr,
    indices_ptr,
    owners_ptr,
    num_pages,
    num_rows,
    row_pages,
    num_lines,
    num_entries,
    first_generation: tl.int64,
    step: tl.int64,
    BLOCK: tl.constexpr,
):
    """Seals free pages for logical pages of rows, which expect that from here on."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < num_entries
    page = tl.load(pages_ptr + entry, mask=is_entry, other=-1).to(tl.int64)
    row = tl.load(rows_ptr + entry, mask=is_entry, other=-1).to(tl.int64)
    index = tl.load(indices_ptr + entry, mask=is_entry, other=-1).to(tl.int64)
    owner = tl.load(owners_ptr + entry, mask=is_entry, other=0).to(tl.int64)
    is_inside = (page >= 0) & (page < num_pages)
    seal, old_generation, old_owner, place = _found(seals_ptr, records_ptr, page, is_inside)
    tl.debug_barrier()  # what lay there is read before any of the program's pages is sealed
    generation = _generations(first_generation, entry)
    granted = seal_of(generation, owner, index & _PLACE_MASK)
    is_again = _exchange(seals_ptr, records_ptr, states_ptr, page, is_inside, granted, generation, owner, index, _HELD)
    is_expected = is_inside & (row >= 0) & (row < num_rows) & (index >= 0) & (index < row_pages)
    tl.store(expected_ptr + row * row_pages + index, granted, mask=is_expected)
    details_ptr += detail_at(row, index, row_pages)
    tl.store(details_ptr, generation, mask=is_expected)
    tl.store(details_ptr + 1, owner, mask=is_expected)
    is_bad = is_entry & (is_again | ~is_inside)
    count = tl.sum(is_bad.to(tl.int32), 0)
    if count > 0:
        opening = tl.load(openings_ptr + row, mask=is_bad & (row >= 0) & (row < num_rows), other=0)
        line, has_room = begin_lines(
            lines_ptr, count_ptr, num_lines, is_bad, count, step, _GRANT, row, index, page, 0, 0, opening
        )
        write_expected(line, has_room, 0, 0, 0)
        write_found(line, has_room, seal, old_generation, old_owner, place)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=VECTORS)
def release_kernel(  # type: ignore[no-untyped-def]
    seals_ptr,
    records_ptr,
    states_ptr,
    lines_ptr,
    count_ptr,
    pages_ptr,
    num_pages,
    num_lines,
    num_entries,
    first_generation: tl.int64,
    step: tl.int64,
    BLOCK: tl.constexpr,
):
    """Seals pages as free."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < num_entries
    page = tl.load(pages_ptr + entry, mask=is_entry, other=-1).to(tl.int64)
    is_inside = (page >= 0) & (page < num_pages)
    seal, old_generation, old_owner, place = _found(seals_ptr, records_ptr, page, is_inside)
    tl.debug_barrier()  # what lay there is read before any of the program's pages is sealed
    generation = _generations(first_generation, entry)
    nobody, index = tl.zeros(page.shape, tl.int64), tl.full(page.shape, _FREE_INDEX, tl.int64)
    free = seal_of(generation, nobody, index)
    is_again = _exchange(seals_ptr, records_ptr, states_ptr, page, is_inside, free, generation, nobody, index, _FREE)
    is_bad = is_entry & (is_again | ~is_inside)
    count = tl.sum(is_bad.to(tl.int32), 0)
    if count > 0:
        line, has_room = begin_lines(
            lines_ptr, count_ptr, num_lines, is_bad, count, step, _RELEASE, -1, 0, page, 0, 0, 0
        )
        write_expected(line, has_room, 0, 0, 0)
        write_found(line, has_room, seal, old_generation, old_owner, place)
