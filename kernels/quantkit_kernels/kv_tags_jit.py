"""The kernels behind the checks of kv_tags.py; what each must leave behind is stated in reference/kv_tags.py.

A thread takes one page. What decides is read first; records and details only of what is wrong, in a branch that a
program without a violation does not enter.
"""

import triton
import triton.language as tl

from quantkit_kernels.kv_tag_arrays import BEYOND, FIRST_SEAL, HOLE, NEVER, PRUNED, SHIFTED, SPOILED, Check, State
from quantkit_kernels.kv_tag_lines_jit import (
    SIZES,
    VECTORS,
    begin_lines,
    detail_at,
    mark_of,
    page_of,
    record_at,
    write_expected,
    write_found,
)

_NEVER, _PRUNED, _SHIFTED = tl.constexpr(NEVER), tl.constexpr(PRUNED), tl.constexpr(SHIFTED)
_BEYOND, _HOLE = tl.constexpr(BEYOND), tl.constexpr(HOLE)
_NO_WORD = tl.constexpr(-FIRST_SEAL)
_SHARED, _SPOILED = tl.constexpr(int(State.SHARED)), tl.constexpr(SPOILED)
_AWAITING, _STRUCK = tl.constexpr(int(State.AWAITING)), tl.constexpr(int(State.STRUCK))
_BEFORE_STEP, _AFTER_STEP = tl.constexpr(int(Check.BEFORE_STEP)), tl.constexpr(int(Check.AFTER_STEP))
_WRITE = tl.constexpr(int(Check.WRITE))


@triton.jit
def _is_place(row, index, num_rows, row_pages):  # type: ignore[no-untyped-def]
    """Rows and logical pages that expectations have."""
    return (row >= 0) & (row < num_rows) & (index >= 0) & (index < row_pages)


@triton.jit
def _judge(  # type: ignore[no-untyped-def]
    seals_ptr,
    records_ptr,
    details_ptr,
    lines_ptr,
    count_ptr,
    num_pages,
    num_rows,
    row_pages,
    num_lines,
    row,
    index,
    page,
    expected,
    is_checked,
    is_wrong,
    slot,
    detail,
    opening_ptrs,
    is_row,
    step,
    CHECK: tl.constexpr,
    SPOILS: tl.constexpr,
):
    """A line for each page whose seal is not what its row expects, or that is wrong whatever its seal is.

    Returns whether any is bad, which are, bool [BLOCK], and the seals that were found.
    """
    is_inside = is_checked & (page >= 0) & (page < num_pages)
    seal = tl.load(seals_ptr + page, mask=is_inside, other=0)
    found = tl.where(is_inside, seal ^ mark_of(page), _NEVER)
    is_bad = is_checked & ((found != expected) | ((expected & _NO_WORD) == 0) | is_wrong)
    count = tl.sum(is_bad.to(tl.int32), 0)
    if count > 0:
        opening = tl.load(opening_ptrs, mask=is_bad & is_row, other=0)
        line, has_room = begin_lines(
            lines_ptr, count_ptr, num_lines, is_bad, count, step, CHECK, row, index, page, slot, detail, opening
        )
        is_known = has_room & _is_place(row, index, num_rows, row_pages)
        details = details_ptr + detail_at(row, index, row_pages)
        generation = tl.load(details, mask=is_known, other=0)
        owner = tl.load(details + 1, mask=is_known, other=0)
        write_expected(line, has_room, expected, generation, owner)
        is_there = has_room & is_inside
        records = records_ptr + record_at(page)
        generation = tl.load(records, mask=is_there, other=0)
        owner = tl.load(records + 1, mask=is_there, other=0)
        place = tl.load(records + 2, mask=is_there, other=0)
        write_found(line, has_room, found, generation, owner, place)
        if SPOILS:  # each seal of the program was read by then: their sum was taken
            tl.store(seals_ptr + page, mark_of(page) ^ _SPOILED, mask=is_bad & is_inside)
    return count > 0, is_bad, found


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=VECTORS)
def check_pages_kernel(  # type: ignore[no-untyped-def]
    seals_ptr,
    records_ptr,
    expected_ptr,
    details_ptr,
    openings_ptr,
    lines_ptr,
    count_ptr,
    table_ptr,
    rows_ptr,
    lengths_ptr,
    firsts_ptr,
    captured_pages_ptr,
    captured_seals_ptr,
    captured_openings_ptr,
    num_pages,
    num_rows,
    row_pages,
    num_lines,
    table_rows,
    table_stride,
    table_width,
    most_pages,
    captured_stride,
    null_page,
    step: tl.int64,
    PAGE_SIZE: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    HAS_FIRSTS: tl.constexpr,
    IS_CAPTURED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Logical pages of one row of the batch: what its table names, what the row expects, and the seals there."""
    request = tl.program_id(0)
    index = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + request).to(tl.int64) + tl.zeros((BLOCK,), tl.int64)  # scalar masks break the interpreter
    is_page = index < most_pages
    last = page_of(tl.load(lengths_ptr + request).to(tl.int64) - 1, PAGE_SIZE)
    is_read = is_page & (index <= last)
    if HAS_FIRSTS:
        is_read &= index >= tl.minimum(tl.load(firsts_ptr + request).to(tl.int64), last)
    is_short = (index == most_pages - 1) & (index < last)
    is_read |= is_short
    is_listed = (row >= 0) & (row < table_rows)
    column = tl.minimum(index * PAGE_SIZE if BY_TOKEN else index, table_width - 1)
    entry = tl.load(table_ptr + row * table_stride + column, mask=is_read & is_listed, other=-1).to(tl.int64)
    page = page_of(entry, PAGE_SIZE) if BY_TOKEN else entry
    is_known = is_read & _is_place(row, index, num_rows, row_pages)
    expected = tl.load(expected_ptr + row * row_pages + index, mask=is_known, other=_NEVER)
    is_padding = expected == _NEVER
    if not HAS_FIRSTS:
        is_padding |= (expected == _PRUNED) & ~is_short
    is_read &= (page != null_page) | ~is_padding | ~is_listed
    if BY_TOKEN:
        expected = tl.where(is_read & (entry != page * PAGE_SIZE), _SHIFTED, expected)
    expected = tl.where(is_read & is_short, _BEYOND, expected)
    is_row = (row >= 0) & (row < num_rows)
    if IS_CAPTURED:
        is_first = index == 0  # one thread of a request's programs
        opening = tl.load(openings_ptr + row, mask=is_first & is_row, other=0)
        tl.store(captured_openings_ptr + request + index, opening, mask=is_first)
        at = request.to(tl.int64) * captured_stride + index
        tl.store(captured_pages_ptr + at, tl.where(is_read, page, -1).to(tl.int32), mask=is_page)
        tl.store(captured_seals_ptr + at, expected, mask=is_page)
    _judge(
        seals_ptr,
        records_ptr,
        details_ptr,
        lines_ptr,
        count_ptr,
        num_pages,
        num_rows,
        row_pages,
        num_lines,
        row,
        index,
        page,
        expected,
        is_read,
        False,
        -1,
        0,
        openings_ptr + row,
        is_row,
        step,
        _BEFORE_STEP,
        False,
    )


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=VECTORS)
def check_captured_kernel(  # type: ignore[no-untyped-def]
    seals_ptr,
    records_ptr,
    details_ptr,
    lines_ptr,
    count_ptr,
    rows_ptr,
    captured_pages_ptr,
    captured_seals_ptr,
    captured_openings_ptr,
    num_pages,
    num_rows,
    row_pages,
    num_lines,
    most_pages,
    captured_stride,
    step: tl.int64,
    BLOCK: tl.constexpr,
):
    """Logical pages of one row of the batch, as they were captured."""
    request = tl.program_id(0)
    index = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_page = index < most_pages
    at = request.to(tl.int64) * captured_stride + index
    page = tl.load(captured_pages_ptr + at, mask=is_page, other=-1).to(tl.int64)
    expected = tl.load(captured_seals_ptr + at, mask=is_page, other=_NEVER)
    _judge(
        seals_ptr,
        records_ptr,
        details_ptr,
        lines_ptr,
        count_ptr,
        num_pages,
        num_rows,
        row_pages,
        num_lines,
        tl.load(rows_ptr + request).to(tl.int64) + tl.zeros((BLOCK,), tl.int64),
        index,
        page,
        expected,
        page != -1,
        False,
        -1,
        0,
        captured_openings_ptr + request + tl.zeros((BLOCK,), tl.int64),
        is_page,
        step,
        _AFTER_STEP,
        False,
    )


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=VECTORS)
def check_writes_kernel(  # type: ignore[no-untyped-def]
    seals_ptr,
    records_ptr,
    states_ptr,
    expected_ptr,
    details_ptr,
    openings_ptr,
    lines_ptr,
    count_ptr,
    slots_ptr,
    rows_ptr,
    positions_ptr,
    num_pages,
    num_rows,
    row_pages,
    num_lines,
    num_entries,
    null_page,
    step: tl.int64,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tokens that a step stores: what their rows expect of their pages, and seals and states there."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < num_entries
    slot = tl.load(slots_ptr + entry, mask=is_entry, other=-1).to(tl.int64)
    row = tl.load(rows_ptr + entry, mask=is_entry, other=-1).to(tl.int64)
    position = tl.load(positions_ptr + entry, mask=is_entry, other=0).to(tl.int64)
    page, index = page_of(slot, PAGE_SIZE), page_of(position, PAGE_SIZE)
    is_known = (slot >= 0) & _is_place(row, index, num_rows, row_pages)
    expected = tl.load(expected_ptr + row * row_pages + index, mask=is_known, other=_NEVER)
    is_granted = (expected & _NO_WORD) != 0
    is_stored = (slot >= 0) & ((page != null_page) | is_granted)
    state = tl.load(states_ptr + page, mask=is_stored & (page < num_pages), other=0)
    is_out_of_place = slot - page * PAGE_SIZE != position - index * PAGE_SIZE
    is_any, is_bad, found = _judge(
        seals_ptr,
        records_ptr,
        details_ptr,
        lines_ptr,
        count_ptr,
        num_pages,
        num_rows,
        row_pages,
        num_lines,
        row,
        index,
        page,
        expected,
        is_stored,
        (state == _SHARED) | is_out_of_place,
        slot,
        position,
        openings_ptr + row,
        (row >= 0) & (row < num_rows),
        step,
        _WRITE,
        True,
    )
    if is_any:
        tl.store(states_ptr + page, _STRUCK, mask=is_bad & (state >= _AWAITING))
        is_hole = is_bad & is_granted & ((found != expected) | is_out_of_place)
        tl.store(expected_ptr + row * row_pages + index, _HOLE, mask=is_hole)
