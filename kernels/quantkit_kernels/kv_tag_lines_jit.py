"""What the kernels of page tags share: seals, pages of slots, and lines of the ring of violations."""

import triton
import triton.language as tl

from quantkit_kernels.kv_tag_arrays import LINE_WORDS, MARK, Word

SIZES = [  # another size, step or batch is the same kernel
    *("num_pages", "num_rows", "row_pages", "num_lines", "num_entries", "null_page", "step", "first_generation"),
    *("most_pages", "captured_stride", "table_rows", "table_stride", "table_width"),
]
VECTORS = [  # and so is a slice that begins anywhere
    *("pages_ptr", "rows_ptr", "indices_ptr", "owners_ptr", "slots_ptr", "positions_ptr"),
    *("table_ptr", "lengths_ptr", "firsts_ptr"),
]

_FIRST, _SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
_MARK = tl.constexpr(MARK)
_LINE_WORDS = tl.constexpr(LINE_WORDS)
_STEP, _CHECK, _ROW = tl.constexpr(int(Word.STEP)), tl.constexpr(int(Word.CHECK)), tl.constexpr(int(Word.ROW))
_EXPECTED, _FOUND = tl.constexpr(int(Word.EXPECTED_SEAL)), tl.constexpr(int(Word.FOUND_SEAL))
_SLOT, _DETAIL = tl.constexpr(int(Word.SLOT)), tl.constexpr(int(Word.DETAIL))


@triton.jit
def mix(x):  # type: ignore[no-untyped-def]
    """Splitmix64's finalizer of uint64, whose shifts bring zeros."""
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def seal_of(generation, owner, index):  # type: ignore[no-untyped-def]
    """Of records, without a page's mark; int64 of int64, as bits."""
    mixed = mix(mix(generation.to(tl.uint64)) ^ owner.to(tl.uint64))
    return mix(mixed + index.to(tl.uint64)).to(tl.int64)


@triton.jit
def mark_of(page):  # type: ignore[no-untyped-def]
    """What makes a seal that of a page; int64 of int64."""
    return mix((page + _MARK).to(tl.uint64)).to(tl.int64)


@triton.jit
def page_of(slot, PAGE_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of slots in int64, rounded down below 0, too, where a division rounds towards it."""
    sign = slot >> 63
    return ((slot ^ sign) // PAGE_SIZE) ^ sign


@triton.jit
def record_at(page):  # type: ignore[no-untyped-def]
    """Where a record begins."""
    return page.to(tl.int64) * 3


@triton.jit
def detail_at(row, index, row_pages):  # type: ignore[no-untyped-def]
    """Where the details of a row's logical page begin."""
    return (row.to(tl.int64) * row_pages + index) * 2


@triton.jit
def _write_words(line, has_room, FIRST: tl.constexpr, first, second, third):  # type: ignore[no-untyped-def]
    tl.store(line + FIRST, first, mask=has_room)
    tl.store(line + FIRST + 1, second, mask=has_room)
    tl.store(line + FIRST + 2, third, mask=has_room)


@triton.jit
def begin_lines(  # type: ignore[no-untyped-def]
    lines_ptr, count_ptr, num_lines, is_bad, count, step, CHECK: tl.constexpr, row, index, page, slot, detail, opening
):
    """A line for each of ``count`` that are bad, as far as there is room; all are counted, by one atomic."""
    first = tl.atomic_add(count_ptr, count.to(tl.int64), sem="relaxed")
    at = first + tl.cumsum(is_bad.to(tl.int32), 0) - 1
    line, has_room = lines_ptr + at * _LINE_WORDS, is_bad & (at < num_lines)
    tl.store(line + _STEP, step, mask=has_room)
    tl.store(line + _CHECK, CHECK, mask=has_room)
    _write_words(line, has_room, _ROW, row, index, page)
    tl.store(line + _SLOT, slot, mask=has_room)
    _write_words(line, has_room, _DETAIL, detail, opening, 0)
    return line, has_room


@triton.jit
def write_expected(line, has_room, seal, generation, owner):  # type: ignore[no-untyped-def]
    _write_words(line, has_room, _EXPECTED, seal, generation, owner)


@triton.jit
def write_found(line, has_room, seal, generation, owner, place):  # type: ignore[no-untyped-def]
    _write_words(line, has_room, _FOUND, seal, generation, owner)
    tl.store(line + _FOUND + 3, place, mask=has_room)
