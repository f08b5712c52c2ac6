"""Tags of KV pages on a GPU: granted, released and checked by one launch each. reference/kv_tags.py holds the twins.

Nothing waits for the GPU, and nothing is allocated but a copy of an argument that has gaps. A violation is a line of
the ring as long as there is room, in no order; all are counted. A program of 128 threads takes a page a thread, and
adds to the count only if it found something.

Bytes of a page in `check_pages`: its entry in the table is 4 (of a table of tokens a sector of 32, as the next page's
is further away), its seal 8 (a sector of 32 where pages are scattered), what its row expects 8; 12 are written where
they are captured. `check_captured` reads those 12 and the seal. Records and details are read of violations alone.

A page that is named twice in one call changes its state once: of its entries all but one are violations, whichever they
are, and the tag that stays is that of one of these. What such a line found may be the tag of another entry.
"""

import triton
from torch import Tensor

from quantkit_kernels.kv_tag_arrays import Captured, Expectations, PageTags, Ring
from quantkit_kernels.kv_tag_checks import (
    check_arrays,
    check_page_size,
    check_room,
    check_table,
    check_tags,
    vectors,
)
from quantkit_kernels.kv_tag_grants_jit import grant_kernel, release_kernel
from quantkit_kernels.kv_tags_jit import check_captured_kernel, check_pages_kernel, check_writes_kernel
from quantkit_kernels.launch import check_runs, launches

BLOCK = 128  # pages of a program, a thread each
OPTIONS = {"BLOCK": BLOCK, "num_warps": BLOCK // 32, "enable_fp_fusion": False}


def _signed(number: int) -> int:
    """The bits of a number of 64 bits, as int64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@launches
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
    """Seal free pages for logical pages of rows, and let the rows expect that. A page that is held is a violation."""
    columns = vectors(pages=pages, rows=rows, indices=indices, owners=owners)
    num_rows, row_pages = check_arrays(tags, expectations, ring, pages)
    if len(pages):
        check_runs(pages)
        grant_kernel[(triton.cdiv(len(pages), BLOCK),)](
            tags.seals_P,
            tags.records_P3,
            tags.states_P,
            expectations.seals_RL,
            expectations.details_RL2,
            expectations.openings_R,
            ring.lines_KW,
            ring.count_1,
            *columns,
            tags.num_pages,
            num_rows,
            row_pages,
            ring.num_lines,
            len(pages),
            _signed(first_generation),
            step,
            **OPTIONS,
        )


@launches
def release_pages(tags: PageTags, ring: Ring, pages: Tensor, *, first_generation: int, step: int) -> None:
    """Seal pages as free, under new generations. A page that is free already, or named twice, is a violation."""
    (vector,) = vectors(pages=pages)
    check_tags(tags, ring, pages)
    if len(pages):
        check_runs(pages)
        release_kernel[(triton.cdiv(len(pages), BLOCK),)](
            tags.seals_P,
            tags.records_P3,
            tags.states_P,
            ring.lines_KW,
            ring.count_1,
            vector,
            tags.num_pages,
            ring.num_lines,
            len(pages),
            _signed(first_generation),
            step,
            **OPTIONS,
        )


@launches
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
    """Before a step: is every page that the batch will read the one that its row was granted? See the twin.

    ``table`` int32 or int64 [rows, entries], whose rows may be further apart; the others [B].
    """
    batch = {"rows": rows, "lengths": lengths} | ({} if firsts is None else {"firsts": firsts})
    columns = vectors(**batch)
    num_rows, row_pages = check_arrays(tags, expectations, ring, rows)
    check_page_size(page_size)
    check_table(table, rows)
    stride = 0 if captured is None else check_room(captured, len(rows), most_pages, rows)
    if len(rows) and most_pages > 0:
        check_runs(rows)
        check_pages_kernel[(len(rows), triton.cdiv(most_pages, BLOCK))](
            tags.seals_P,
            tags.records_P3,
            expectations.seals_RL,
            expectations.details_RL2,
            expectations.openings_R,
            ring.lines_KW,
            ring.count_1,
            table,
            columns[0],
            columns[1],
            columns[-1],
            tags.states_P if captured is None else captured.pages_BL,
            tags.seals_P if captured is None else captured.seals_BL,
            tags.seals_P if captured is None else captured.openings_B,
            tags.num_pages,
            num_rows,
            row_pages,
            ring.num_lines,
            len(table),
            table.stride(0),
            table.shape[1],
            most_pages,
            stride,
            null_page,
            step,
            PAGE_SIZE=page_size,
            BY_TOKEN=by_token,
            HAS_FIRSTS=firsts is not None,
            IS_CAPTURED=captured is not None,
            **OPTIONS,
        )


@launches
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
    (vector,) = vectors(rows=rows)
    num_rows, row_pages = check_arrays(tags, expectations, ring, rows)
    stride = check_room(captured, len(rows), most_pages, rows)
    if len(rows) and most_pages > 0:
        check_runs(rows)
        check_captured_kernel[(len(rows), triton.cdiv(most_pages, BLOCK))](
            tags.seals_P,
            tags.records_P3,
            expectations.details_RL2,
            ring.lines_KW,
            ring.count_1,
            vector,
            captured.pages_BL,
            captured.seals_BL,
            captured.openings_B,
            tags.num_pages,
            num_rows,
            row_pages,
            ring.num_lines,
            most_pages,
            stride,
            step,
            **OPTIONS,
        )


@launches
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
    """Does each token go to its own page, at its own place, and does no other row read there? All are [N].

    A page where one does not belong is spoiled. A token that another program of this launch checks there behind that is
    a violation, too: `check_captured` would find its row in any case.
    """
    columns = vectors(slots=slots, rows=rows, positions=positions)
    num_rows, row_pages = check_arrays(tags, expectations, ring, slots)
    check_page_size(page_size)
    if len(slots):
        check_runs(slots)
        check_writes_kernel[(triton.cdiv(len(slots), BLOCK),)](
            tags.seals_P,
            tags.records_P3,
            tags.states_P,
            expectations.seals_RL,
            expectations.details_RL2,
            expectations.openings_R,
            ring.lines_KW,
            ring.count_1,
            *columns,
            tags.num_pages,
            num_rows,
            row_pages,
            ring.num_lines,
            len(slots),
            null_page,
            step,
            PAGE_SIZE=page_size,
            **OPTIONS,
        )
