"""Page tags at the edges: pages named twice, full rings, arrays beyond 2^31, arguments that are refused."""

import inspect
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from quantkit_kernels import kv_tags, reference
from quantkit_kernels.kv_tag_arrays import (
    BEYOND,
    FIRST_SEAL,
    HOLE,
    PRUNED,
    SHIFTED,
    SPOILED,
    Check,
    PageTags,
    Ring,
    State,
    Word,
    new_captured,
)
from quantkit_kernels.kv_tag_lines_jit import detail_at, page_of, record_at
from tests.kernels.kv_tag_pools import Both, mix, new_pool, numbers, seal_of, signed, stored_seal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("quiet_numpy")]
OPS = ("grant_pages", "release_pages", "check_pages", "check_captured", "check_writes")
FIRST = {"first_generation": 9, "step": 0}
PAGED = {"page_size": 4, "by_token": False, "most_pages": 2, "step": 3}
BOTH = pytest.mark.parametrize("module", [kv_tags, reference], ids=["kernel", "twin"])


def placed(entries, device):
    """Page, row and logical index of each entry; rows are their own owners."""
    pages, rows, indices = zip(*entries, strict=True)
    return [numbers(one, device) for one in (pages, rows, indices, rows)]


def assert_is_whole(pool, page):
    """The seal is that of the record, at this page."""
    generation, owner, index = pool.records_P3[page].tolist()
    assert pool.seals_P[page].item() == signed(stored_seal(generation, owner, index, page))


@BOTH
def test_every_row_that_a_page_was_granted_to_is_named_if_there_are_two(module, device):
    """In one call: page 5 by one program and page 6 by two. Whoever comes first, the page is not his alone."""
    pool = new_pool(device, num_pages=300, most_pages=150)
    others = [(page, 3, page - 10) for page in range(10, 160)]
    entries = placed([(5, 0, 1), (6, 1, 0), (5, 2, 0), *others, (6, 2, 1)], device)
    pool.run(module, "grant_pages", *entries, first_generation=9, step=0)
    assert sorted(line[Word.PAGE] for line in pool.lines) == [5, 6]
    assert all(line[Word.CHECK] == Check.GRANT for line in pool.lines)
    assert pool.states_P[[5, 6, 10]].tolist() == [State.HELD] * 3
    table = numbers([299, 5, 6, 299, 5, 6], device).view(3, 2)
    batch, lengths, firsts = (numbers(one, device) for one in ([0, 1, 2], [8, 4, 8], [1, 0, 0]))
    pool.run(module, "check_pages", table, batch, lengths, firsts, **PAGED)
    assert sorted((line[Word.ROW], line[Word.PAGE]) for line in pool.lines) == [(0, 5), (1, 6), (2, 5), (2, 6)]
    for page in (5, 6):
        assert_is_whole(pool, page)


@BOTH
@pytest.mark.parametrize("num_others", [1, 150])
def test_a_page_is_spoiled_by_a_token_that_does_not_belong_there(num_others, module, device):
    """Page 5 is row 0's. Row 1 stores there, and row 0 after it: by the same program, and by another."""
    pool = new_pool(device, num_pages=300, most_pages=200)
    others = [(page, 1, page - 10) for page in range(10, 10 + num_others)]
    pool.run(module, "grant_pages", *placed([(5, 0, 0), *others], device), first_generation=9, step=0)
    slots = [5 * 4 + 1, *(page * 4 + 1 for page, _, _ in others), 5 * 4 + 2]
    positions = [1, *(index * 4 + 1 for _, _, index in others), 2]
    rows = [*[1] * (1 + num_others), 0]
    stores = [numbers(one, device) for one in (slots, rows, positions)]
    pool.run(module, "check_writes", *stores, page_size=4, step=3)
    first, *seen_by_others = sorted(pool.lines, key=lambda line: -line[Word.ROW])
    assert (first[Word.ROW], first[Word.PAGE], first[Word.SLOT]) == (1, 5, 21)
    assert [(line[Word.ROW], line[Word.FOUND_SEAL]) for line in seen_by_others] in ([], [(0, SPOILED)])
    assert module is not reference or not seen_by_others
    assert pool.seals_P[5].item() ^ signed(mix(5 + 0x51ED2705)) == SPOILED
    assert_is_whole(pool, 10)
    before = int(pool.count_1)
    table = numbers([5, 10], device).view(2, 1)
    pool.run(
        module, "check_pages", table, numbers([0, 1], device), numbers([4, 4], device), **PAGED | {"most_pages": 1}
    )
    found = sorted((line[Word.ROW], line[Word.FOUND_SEAL], line[Word.EXPECTED_SEAL]) for line in pool.lines[before:])
    assert found[0][:2] == (0, SPOILED)
    assert [(row, expected) for row, _, expected in found[1:]] == [(1, HOLE)]  # its token is not where it should be


@BOTH
@pytest.mark.parametrize("calls", [[[3, 8, 3]], [[3], [3, 8]], [[3, *range(20, 150), 3, 8]]])
def test_a_page_that_is_released_twice_is_one_violation(calls, module, device):
    """In one call and in two, by one program and by two; it stays free."""
    pool = new_pool(device, num_pages=150, most_pages=140)
    entries = placed([(3, 0, 0), (8, 0, 1), *((page, 1, page - 20) for page in range(20, 150))], device)
    pool.run(module, "grant_pages", *entries, first_generation=9, step=0)
    for pages in calls:
        pool.run(module, "release_pages", numbers(pages, device), first_generation=1000, step=2)
    assert int(pool.count_1) == 1
    assert [pool.lines[0][word] for word in (Word.PAGE, Word.CHECK, Word.ROW)] == [3, Check.RELEASE, -1]
    assert pool.states_P[[3, 8]].tolist() == [0, 0]
    assert_is_whole(pool, 3)


@BOTH
def test_a_page_that_waits_for_a_transfer_remembers_a_token_that_was_stored_there(module, device):
    """Pages 5 to 8 are held, shared, awaited and reserved; row 1 holds none of them."""
    pool = new_pool(device, num_pages=16)
    pool.run(module, "grant_pages", *placed([(page, 0, page - 5) for page in range(5, 9)], device), **FIRST)
    waiting = [State.HELD, State.SHARED, State.AWAITING, State.RESERVED]
    pool.states_P[5:9] = numbers(waiting, device, torch.int32)
    stores = [numbers(one, device) for one in ([20, 24, 28, 32, -1], [1] * 5, [0] * 5)]
    pool.run(module, "check_writes", *stores, page_size=4, step=3)
    assert pool.states_P[5:9].tolist() == [State.HELD, State.SHARED, State.STRUCK, State.STRUCK]
    assert int(pool.count_1) == 4


@BOTH
def test_a_line_names_who_had_the_row_at_the_launch(module, device):
    """Behind the step, too, when the row is another's; and nobody where there is no such row."""
    pool = new_pool(device, num_pages=16)
    batch, lengths = numbers([2, 7], device), numbers([4, 4], device)
    table = numbers([9] * 8, device).view(8, 1)
    for name, arguments in (("check_pages", (table, batch, lengths)), ("check_captured", (batch,))):
        more = {"captured": True, **PAGED} if name == "check_pages" else {"step": 3}
        pool.run(module, name, *arguments, **more | {"most_pages": 1})
        pool.openings_R[:] = 99
    lines = sorted((line[Word.CHECK], line[Word.ROW], line[Word.OPENING]) for line in pool.lines)
    assert lines == [(check, row, opening) for check in (1, 2) for row, opening in ((2, 72), (7, 0))]


@BOTH
@pytest.mark.parametrize(("length", "first", "pages"), [(8, 5, [(1, 0)]), (9, 0, [(0, 0), (1, BEYOND)])])
def test_the_last_page_is_looked_at_and_says_where_more_follow(length, first, pages, module, device):
    """Wherever the first is said to be. Nothing was granted; null pages would be padding."""
    pool = new_pool(device, num_pages=16)
    batch, table = numbers([0], device), numbers([9, 9], device).view(1, 2)
    more = numbers([length], device), numbers([first], device)
    pool.run(module, "check_pages", table, batch, *more, **PAGED)
    assert sorted((line[Word.INDEX], line[Word.EXPECTED_SEAL]) for line in pool.lines) == pages


@BOTH
def test_a_line_says_what_was_expected_and_what_was_found(module, device):
    """Word by word. A page outside the pool has no tag."""
    pool = new_pool(device, num_pages=8)
    pool.run(module, "grant_pages", *placed([(2, 0, 1), (3, 1, 0)], device), first_generation=9, step=0)
    table = numbers([7, 3, 99, 0], device, torch.int32).view(2, 2)
    batch, lengths, firsts = (numbers(one, device) for one in ([0, 1], [8, 4], [1, 0]))
    pool.run(module, "check_pages", table, batch, lengths, firsts, **PAGED)
    first, second = signed(seal_of(9, 0, 1)), signed(seal_of(10, 1, 0))
    assert sorted(pool.lines) == [
        (3, Check.BEFORE_STEP, 0, 1, 3, first, 9, 0, second, 10, 1, 0, -1, 0, 70, 0),
        (3, Check.BEFORE_STEP, 1, 0, 99, second, 10, 1, 0, 0, 0, 0, -1, 0, 71, 0),
    ]
    slots, rows, positions = (numbers(one, device) for one in ([13, -1], [1, 7], [2, -5]))
    pool.run(module, "check_writes", slots, rows, positions, page_size=4, step=4)
    assert pool.lines[2:] == [(4, Check.WRITE, 1, 0, 3, second, 10, 1, second, 10, 1, 0, 13, 2, 71, 0)]


@pytest.mark.parametrize(("null_page", "count"), [(0, 1), (-1, 2)])
def test_a_null_page_may_stand_where_a_row_was_granted_nothing_and_nowhere_else(null_page, count, device):
    both = Both(device, num_pages=8)
    both.run("grant_pages", *placed([(2, 0, 0)], device), first_generation=1, step=0)
    table, batch, lengths = numbers([0, 0], device).view(1, 2), numbers([0], device), numbers([8], device)
    both.run("check_pages", table, batch, lengths, captured=True, null_page=null_page, **PAGED)
    assert sorted(line[Word.INDEX] for line in both.got.lines) == list(range(count))
    assert both.got.pages_BL[0, :2].tolist() == [0, -1 if null_page == 0 else 0]


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("firsts", [None, [0, 1, 0], [1, 0, 0]])
def test_null_pages_of_a_row_that_is_pruned_are_padding_unless_it_is_said_where_it_is_read(firsts, by_token, device):
    """Row 0 has left its first page behind, row 1 its second; nobody has opened row 2."""
    both = Both(device, num_pages=8)
    both.run("grant_pages", *placed([(2, 0, 1), (3, 1, 0)], device), first_generation=1, step=0)
    both.change("seals_RL", (0, 0), PRUNED)
    both.change("seals_RL", (1, 1), PRUNED)
    table = numbers([0, 2, 3, 0, 0, 0], device, torch.int32).view(3, 2)
    if by_token:
        table = (table.view(3, 2, 1) * 4 + torch.arange(4, device=device, dtype=torch.int32)).view(3, 8)
    batch, lengths = numbers([0, 1, 2], device), numbers([8, 8, 8], device)
    given = None if firsts is None else numbers(firsts, device)
    options = PAGED | {"by_token": by_token, "null_page": 0}
    both.run("check_pages", table, batch, lengths, given, captured=True, **options)
    both.run("check_captured", batch, most_pages=2, step=3)
    read = [] if firsts is None else [(0, 0)] * (firsts[0] == 0) + [(1, 1)]
    assert sorted((line[Word.ROW], line[Word.INDEX]) for line in both.got.lines) == sorted(read * 2)
    assert {line[Word.EXPECTED_SEAL] for line in both.got.lines} <= {PRUNED}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_page_whose_first_token_is_not_in_its_first_slot(dtype, device):
    """Page 2 at slot 9, a slot below 0, and beyond the row's length; page 3 as it should be."""
    both = Both(device, num_pages=8)
    entries = placed([(2, 0, 0), (3, 0, 1), (4, 1, 0), (5, 1, 1)], device)
    both.run("grant_pages", *entries, first_generation=1, step=0)
    table = numbers([*range(9, 13), *range(12, 16), *range(-3, 1), *range(21, 25)], device, dtype).view(2, 8)
    batch, lengths = numbers([0, 1], device), numbers([8, 4], device)
    both.run("check_pages", table, batch, lengths, captured=True, **PAGED | {"by_token": True})
    both.run("check_captured", batch, most_pages=2, step=3)
    found = sorted((line[Word.ROW], line[Word.PAGE], line[Word.CHECK]) for line in both.got.lines)
    assert found == [
        (0, 2, Check.BEFORE_STEP),
        (0, 2, Check.AFTER_STEP),
        (1, -1, Check.BEFORE_STEP),
    ]
    assert {line[Word.EXPECTED_SEAL] for line in both.got.lines} == {SHIFTED}


@pytest.mark.parametrize("word", range(FIRST_SEAL))
def test_no_word_is_the_seal_of_a_page(word, device):
    """Whoever expects one does not pass, though it lies there."""
    both = Both(device, num_pages=8)
    both.run("grant_pages", *placed([(2, 0, 0)], device), first_generation=1, step=0)
    both.change("seals_RL", (0, 0), word)
    both.change("seals_P", 2, signed(mix(2 + 0x51ED2705)) ^ word)
    batch, lengths = numbers([0], device), numbers([4], device)
    both.run("check_pages", numbers([2], device).view(1, 1), batch, lengths, captured=True, **PAGED)
    both.run("check_writes", numbers([8], device), batch, numbers([0], device), page_size=4, step=3)
    assert [line[Word.FOUND_SEAL] for line in both.got.lines] == [word] * 2


def test_arguments_of_32_bits(device):
    both, narrow = Both(device, num_pages=8), torch.int32
    entries = [one.to(narrow) for one in placed([(2, 0, 0), (3, 1, 0)], device)]
    batch, lengths = numbers([0, 1], device, narrow), numbers([4, 4], device, narrow)
    both.run("grant_pages", *entries, first_generation=1, step=0)
    table = numbers([2, 2], device, narrow).view(2, 1)
    both.run("check_pages", table, batch, lengths, batch * 0, captured=True, **PAGED)
    both.run("check_captured", batch, most_pages=2, step=0)
    both.run("check_writes", batch * 4 + 8, batch, batch * 0, page_size=4, step=3)
    both.run("release_pages", entries[0], first_generation=9, step=0)
    assert int(both.got.count_1) == 2


def test_what_a_table_does_not_reach_is_its_last_entry(device):
    """And not what lies behind it in memory."""
    both = Both(device, num_pages=8)
    both.run("grant_pages", *placed([(2, 0, 0), (3, 0, 1)], device), first_generation=1, step=0)
    batch, lengths = numbers([0], device), numbers([8], device)
    for table, by_token in (([2, 3], False), ([8, 9, 10, 11, 12], True)):
        wide = numbers(table, device).view(1, -1)
        both.run("check_pages", wide, batch, lengths, **PAGED | {"by_token": by_token})
        both.run("check_pages", wide[:, :-1], batch, lengths, **PAGED | {"by_token": by_token})
    assert [line[Word.PAGE] for line in both.got.lines] == [2, 2]


def test_a_ring_that_is_full_counts_on(device):
    """Three programs of 128 pages, of which none is right, and room for ten."""
    both = Both(device, num_pages=8, most_pages=300, num_lines=10)
    table = torch.zeros((1, 300), dtype=torch.int32, device=device)
    batch, lengths = numbers([0], device), numbers([300], device)
    for count in (300, 600):
        both.run("check_pages", table, batch, lengths, page_size=1, by_token=False, most_pages=300, step=0)
        assert int(both.got.count_1) == count


def test_what_is_nothing_leaves_nothing(device):
    both, none = Both(device, num_pages=8), numbers([], device)
    batch, table = numbers([0, 1], device), numbers([0, 0], device).view(2, 1)
    both.run("grant_pages", none, none, none, none, first_generation=1, step=0)
    both.run("release_pages", none, first_generation=1, step=0)
    both.run("check_pages", table, none, none, captured=True, **PAGED)
    both.run("check_pages", table, batch, batch, captured=True, **PAGED | {"most_pages": 0})
    both.run("check_pages", table, batch, batch * 0, **PAGED)
    both.run("check_captured", none, most_pages=2, step=0)
    both.run("check_writes", none, none, none, page_size=4, step=0)
    both.run("check_writes", numbers([-1, -7], device), batch, batch, page_size=4, step=0)
    assert int(both.got.count_1) == 0


def test_arguments_with_gaps(device):
    both = Both(device, num_pages=8)
    wide = torch.arange(8, device=device).view(4, 2)
    row = numbers([1], device).expand(4)
    both.run("grant_pages", wide[:, 1], row, wide[:, 0], wide[:, 0], first_generation=1, step=0)
    both.run("release_pages", wide[:, 0], first_generation=9, step=0)
    assert int(both.got.count_1) == 4
    assert both.got.states_P.tolist() == [0, State.HELD] * 4


def test_a_table_beyond_2_to_the_31_entries(device):
    """Of memory that is only asked for: the slots of the last row alone are ever touched."""
    both = Both(device, num_pages=8, num_rows=17)
    stored = torch.empty((1 << 31) + 8, dtype=torch.int32, device=device)
    table = stored.as_strided((17, 8), (1 << 27, 1))
    table[16] = torch.arange(8, 16, dtype=torch.int32)
    both.run("grant_pages", *placed([(2, 16, 0), (3, 16, 1)], device), first_generation=1, step=0)
    batch, lengths = numbers([16], device), numbers([8], device)
    both.run("check_pages", table, batch, lengths, captured=True, **PAGED | {"by_token": True})
    assert int(both.got.count_1) == 0
    assert both.got.pages_BL[0, :2].tolist() == [2, 3]


def test_tags_beyond_two_gigabytes(device):
    """Of a pool whose last page alone is ever touched."""
    count = (1 << 28) + 1
    shapes = {"seals_P": (count,), "records_P3": (count, 3), "states_P": (count,)}
    pools = [new_pool(device, num_pages=1) for _ in range(2)]
    for pool in pools:
        for name, shape in shapes.items():
            pool.arrays[name] = torch.empty(shape, dtype=pool.arrays[name].dtype, device=device)
        pool.states_P[-1] = 0
    for pool, module in zip(pools, (kv_tags, reference), strict=True):
        pool.run(module, "grant_pages", *placed([(count - 1, 0, 0)], device), first_generation=1, step=0)
        table, batch, lengths = (numbers(one, device) for one in ([count - 1], [0, 1], [4, 4]))
        pool.run(module, "check_pages", table.expand(2, 1), batch, lengths, **PAGED)
        assert [line[Word.FOUND_GENERATION] for line in pool.lines] == [1]
        assert_is_whole(pool, count - 1)


@triton.jit
def offsets_kernel(numbers_ptr, records_ptr, details_ptr, pages_ptr, row_pages):
    at = tl.arange(0, 4)
    number = tl.load(numbers_ptr + at)
    tl.store(records_ptr + at, record_at(number))
    tl.store(details_ptr + at, detail_at(number, at, row_pages))
    tl.store(pages_ptr + at, page_of(number.to(tl.int64) - 100, 64))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_go_beyond_31_bits_and_pages_below_zero(dtype, device):
    given = [5, 99, 715_827_883, 2**31 - 1]
    out = torch.zeros((3, 4), dtype=torch.int64, device=device)
    offsets_kernel[(1,)](numbers(given, device, dtype), *out, 131_072)
    assert out[0].tolist() == [3 * number for number in given]
    assert out[1].tolist() == [2 * (131_072 * number + at) for at, number in enumerate(given)]
    assert out[2].tolist() == [(number - 100) // 64 for number in given]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU to wait for")
def test_nothing_waits_and_nothing_is_allocated(device):
    both = Both(device, num_pages=8)
    entries, table = placed([(2, 0, 0), (3, 1, 0)], device), numbers([2, 4, 0, 0], device).view(2, 2)
    batch, lengths = numbers([0, 1], device), numbers([4, 8], device)

    def step():
        both.got.run(kv_tags, "grant_pages", *entries, first_generation=1, step=0)
        both.got.run(kv_tags, "check_pages", table, batch, lengths, captured=True, **PAGED)
        both.got.run(kv_tags, "check_writes", batch, batch, batch, page_size=4, step=0)
        both.got.run(kv_tags, "check_captured", batch, most_pages=2, step=0)
        both.got.run(kv_tags, "release_pages", entries[0], first_generation=9, step=0)

    step()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated


@pytest.mark.parametrize("op", OPS)
def test_twins_have_the_same_signature(op):
    assert inspect.signature(getattr(kv_tags, op)) == inspect.signature(getattr(reference, op))


@pytest.mark.parametrize(
    ("op", "change", "words"),
    [
        ("grant_pages", {"rows": torch.zeros(3, dtype=torch.int64)}, "3 rows for 2 pages"),
        ("grant_pages", {"owners": torch.zeros(2)}, r"owners are int32 or int64 \[pages\], not torch.float32 \(2,\)"),
        ("release_pages", {"pages": torch.zeros((2, 1), dtype=torch.int64)}, r"not torch.int64 \(2, 1\)"),
        ("check_pages", {"lengths": torch.zeros(1, dtype=torch.int32)}, "1 lengths for 2 rows"),
        ("check_pages", {"table": torch.zeros((2, 2))}, "table is int32 or int64"),
        ("check_pages", {"table": torch.zeros((2, 0), dtype=torch.int32)}, "table is int32 or int64"),
        ("check_pages", {"table": torch.zeros((0, 4), dtype=torch.int32)}, "table is int32 or int64"),
        ("check_captured", {"captured": replace(new_captured(8, 8), openings_B=torch.zeros(8))}, "openings_B"),
        ("check_pages", {"table": torch.zeros((2, 2), dtype=torch.int32).mT}, "of strides"),
        ("check_pages", {"page_size": 0}, "page_size is at least 1, not 0"),
        ("check_pages", {"most_pages": 9}, r"captured has room for \(8, 8\), not for 2 rows of 9 pages"),
        ("check_captured", {"rows": torch.zeros(9, dtype=torch.int64)}, "not for 9 rows of 2 pages"),
        ("check_captured", {"captured": replace(new_captured(1, 2), pages_BL=torch.zeros(1, 2))}, "pages_BL"),
        ("check_writes", {"rows": torch.zeros(2, dtype=torch.int64, device="meta")}, "rows is on meta, slots on cpu"),
        (
            "check_writes",
            {"ring": Ring(lines_KW=torch.zeros(3, 8, dtype=torch.int64), count_1=torch.zeros(1, dtype=torch.int64))},
            r"lines_KW is torch.int64 \(3, 16\) without gaps, not torch.int64 \(3, 8\)",
        ),
        (
            "release_pages",
            {"tags": PageTags(seals_P=torch.zeros(4), records_P3=torch.zeros(4, 3), states_P=torch.zeros(4))},
            "seals_P is torch.int64",
        ),
    ],
)
@BOTH
def test_what_does_not_go_together_is_refused(module, op, change, words):
    """By both in the same words."""
    pool, two = new_pool("cpu", num_pages=8), torch.zeros(2, dtype=torch.int64)
    arguments = {"tags": pool.tags, "expectations": pool.expectations, "ring": pool.ring, "captured": pool.captured}
    arguments |= dict.fromkeys(("pages", "rows", "indices", "owners", "lengths", "slots", "positions"), two)
    arguments |= {"table": two.view(2, 1), "first_generation": 1, **PAGED} | change
    taken = inspect.signature(getattr(kv_tags, op)).parameters
    with pytest.raises(ValueError, match=words):
        getattr(module, op)(**{name: value for name, value in arguments.items() if name in taken})
