"""What a request that is ended may give back: its own pages, however they were written to, and no other's."""

import pytest

from quantkit.kv_guard.tracker import Held
from tests.kv_guard.pools import PAGE_SIZE, Pool, numbers


def sent(page=7):
    """Tags of another pool's page, which holds the prompt of 0 to 3."""
    prefill = Pool()
    prefill.begin(0, range(4), [page])
    return prefill.tracker.lift(numbers(page))


@pytest.mark.parametrize("first", [1, (1 << 63) - 17, (1 << 64) - 17])
def test_no_row_gives_back_what_is_reserved_or_what_another_had(first):
    """Row 0's own page was granted to another, which has given it back: its tag is gone. Generations are counted
    round at pages 3 and 4."""
    pool = Pool(first_generation=first)
    pool.begin(0, range(8), [3, 4])
    pool.tracker.release(numbers(3))
    pool.begin(1, range(50, 54), [5])
    pool.tracker.close(1)  # and page 5 waits to be released
    pool.tracker.reserve(numbers(6), 1)
    pool.tracker.land(numbers(6), sent())
    assert pool.tracker.own_pages(0, 0, 2).tolist() == [-1, 4]


def test_a_row_gives_back_its_pages_whatever_has_landed_there():
    pool = Pool()
    pool.begin(0, range(8), [3, 4])
    pool.tracker.land(numbers(3), numbers(11, 12, 13, 1).reshape(1, 4))
    pool.tracker.land(numbers(4), numbers(11, 12, 13, 1).reshape(1, 4))
    assert pool.tracker.own_pages(0, 0, 2).tolist() == [3, 4]
    pool.begin(1, range(50, 58), [5, 6])
    assert pool.tracker.own_pages(1, 0, 2).tolist() == [5, 6]


def test_a_row_gives_back_a_page_that_waits_and_was_written_to():
    """A step that ran ahead of the transfer stored its token there."""
    pool = Pool()
    pool.begin(0, range(6), [3, 4])
    pool.tracker.announce(numbers(3, 4), 9)
    pool.launch(0)
    pool.tracker.check_writes(numbers(4 * PAGE_SIZE + 1), numbers(0), numbers(5))
    pool.tracker.after_step()
    assert pool.tracker.own_pages(0, 0, 2).tolist() == [3, 4]


def test_a_row_gives_back_a_page_to_which_a_transfer_has_come_and_none_that_a_node_holds():
    pool = Pool()
    pool.begin(0, range(8), [3, 4])
    pool.tracker.announce(numbers(3), 1)
    pool.begin(1, range(50, 54), [5])
    pool.tracker.cache(numbers(5), numbers(1), numbers(0))
    pool.tracker.close(1)
    pool.tracker.land(numbers(3, 5), sent().repeat(2, 1))
    pool.tracker.release(numbers(4))
    assert pool.tracker.own_pages(0, 0, 2).tolist() == [3, -1]


def test_a_row_gives_back_a_page_to_which_another_pools_page_of_the_same_number_has_come():
    """Its tag has the right mark, and was drawn elsewhere."""
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.tracker.announce(numbers(3), 1)
    pool.tracker.land(numbers(3), sent(page=3))
    assert pool.tracker.own_pages(0, 0, 1).tolist() == [3]


def test_no_row_gives_back_what_is_free_whatever_has_landed_there():
    """Neither another's tag, nor the row's own, that was put back."""
    pool = Pool()
    pool.begin(0, range(8), [3, 4])
    own = pool.tracker.lift(numbers(3))
    pool.tracker.release(numbers(3))
    pool.tracker.land(numbers(3, 9), own.repeat(2, 1))
    assert pool.tracker.own_pages(0, 0, 2).tolist() == [-1, 4]


def test_no_row_gives_back_anothers_page_whose_record_alone_was_written_over():
    pool = Pool()
    pool.begin(0, range(8), [3, 4])
    pool.begin(1, range(50, 54), [5])
    pool.tracker.release(numbers(3))
    pool.tracker.tags.records_P3[5] = numbers(1, 2, 0)
    assert pool.tracker.own_pages(0, 0, 2).tolist() == [-1, 4]


def test_a_row_gives_back_its_own_of_two_pages_to_which_transfers_have_come():
    pool = Pool()
    for row, page in ((0, 3), (1, 5)):
        pool.begin(row, range(4), [page])
        pool.tracker.announce(numbers(page), row)
    pool.tracker.land(numbers(3, 5), sent().repeat(2, 1))
    assert [pool.tracker.own_pages(row, 0, 1).tolist() for row in (0, 1)] == [[3], [5]]


def test_a_row_gives_back_a_page_with_a_hole():
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.tracker.check_writes(numbers(9 * PAGE_SIZE), numbers(0), numbers(0))
    assert pool.tracker.own_pages(0, 0, 1).tolist() == [3]


def test_a_row_that_shares_what_was_never_granted_gives_back_nothing():
    """Of a page with a hole a node keeps nothing that a page could be; nor was a reserved page granted to anybody."""
    pool = Pool()
    pool.begin(0, range(8), [3, 4])
    pool.tracker.check_writes(numbers(9 * PAGE_SIZE), numbers(0), numbers(4))
    held = pool.tracker.cache(numbers(4), numbers(0), numbers(1))
    pool.tracker.reserve(numbers(6), 1)
    pool.tracker.open(1, "r1")
    pool.tracker.share(numbers(1), numbers(1), held)
    assert pool.tracker.own_pages(1, 1, 1).tolist() == [-1]


def test_what_is_reserved_is_not_that_of_a_row_that_expects_what_no_page_has():
    pool = Pool()
    pool.tracker.reserve(numbers(6), 1)
    pool.tracker.open(1, "r1")
    pool.tracker.share(numbers(1), numbers(0), Held(generations=numbers(0), owners=numbers(5), indices=numbers(0)))
    assert pool.tracker.own_pages(1, 0, 1).tolist() == [-1]


def test_a_page_that_stands_at_two_places_is_given_back_once():
    pool = Pool()
    pool.begin(0, range(4), [3])
    held = pool.tracker.cache(numbers(3), numbers(0), numbers(0))
    pool.tracker.open(1, "r1")
    for index in (0, 1):
        pool.tracker.share(numbers(1), numbers(index), held)
    assert pool.tracker.own_pages(1, 0, 2).tolist() == [3, -1]
