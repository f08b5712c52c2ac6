"""Pages that several read: none of them writes there, whatever became of the page since."""

import pytest

from quantkit.kv_guard.faults import Fault
from tests.kv_guard.pools import PAGE_SIZE, Pool, faults, numbers


def test_a_shared_page_that_was_moved_is_written_no_more():
    pool = Pool()
    pool.begin(0, range(6), [3, 4])
    pool.tracker.cache(numbers(3), numbers(0), numbers(0))
    pool.tracker.move(numbers(3, 4), numbers(8, 9), numbers(0, 0), numbers(0, 1))
    pool.table[0, :2] = numbers(8, 9)
    assert pool.run(0).violations == ()
    pool.tracker.check_writes(numbers(9 * PAGE_SIZE + 1), numbers(0), numbers(5))  # the row's own, as before
    assert pool.run(0).violations == ()
    pool.tracker.check_writes(numbers(8 * PAGE_SIZE), numbers(0), numbers(0))
    assert (Fault.WRITE_TO_SHARED, "write", "r0", 8) in faults(pool.run(0))


@pytest.mark.parametrize("row", [0, 1])
def test_a_fork_that_writes_on_in_its_parents_last_page(row):
    """Neither does the parent: both read there."""
    pool = Pool()
    pool.begin(0, range(6), [3, 4])
    pool.tracker.open(1, "r1")
    pool.tracker.fork(0, 1, numbers(3, 4))
    pool.table[1, :2], pool.lengths[1] = numbers(3, 4), 6
    assert pool.run(0, 1).violations == ()
    pool.tracker.check_writes(numbers(4 * PAGE_SIZE + 2), numbers(row), numbers(6))
    verdict = pool.run(0, 1)
    assert (Fault.WRITE_TO_SHARED, "write", f"r{row}", 4) in faults(verdict)
    assert sorted(verdict.aborted) == ["r0", "r1"]


def test_a_fork_of_pages_that_are_not_its_parents():
    pool = Pool()
    pool.begin(0, range(8), [3, 4])
    pool.begin(2, range(50, 54), [5])
    pool.tracker.open(1, "r1")
    pool.tracker.fork(0, 1, numbers(3, 5))
    pool.tracker.check_writes(numbers(5 * PAGE_SIZE + 1), numbers(2), numbers(1))  # whose it is writes on
    assert faults(pool.run(2)) == [(Fault.OTHER_OWNER, "holder", "r1", 5)]


def test_a_page_that_is_cached_before_its_transfer_has_come_may_still_be_written():
    """So that its release is one of a page where a transfer may write."""
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.tracker.announce(numbers(3), 9)
    pool.tracker.cache(numbers(3), numbers(0), numbers(0))
    pool.tracker.release(numbers(3))
    assert (Fault.LANDING, "landing", None, 3) in faults(pool.run(2))
    pool.begin(1, range(50, 54), [3])
    assert (Fault.SPOILED, "before_step", "r1", 3) in faults(pool.run(1))


@pytest.mark.parametrize("is_touched", [False, True])
def test_a_move_makes_nothing_right(is_touched):
    """A page that is another's, or where a late transfer may write, is so for who shares what it was moved to."""
    pool = Pool()
    if is_touched:
        pool.begin(2, range(50, 54), [1], request="waits")
        pool.tracker.announce(numbers(1), 9)
        pool.tracker.release(numbers(1))
        pool.tracker.close(2)
    pool.begin(0, range(8), [1, 2], request="a")
    if not is_touched:
        pool.tracker.release(numbers(1))
        pool.begin(1, range(20, 24), [1], request="thief")
    pool.tracker.move(numbers(1), numbers(5), numbers(0), numbers(0))
    held = pool.tracker.cache(numbers(5), numbers(0), numbers(0))
    pool.tracker.settle()
    pool.tracker.open(3, "reader")
    pool.tracker.share(numbers(3), numbers(0), held)
    pool.table[3, 0] = 5
    pool.lengths[3] = 4
    assert pool.run(3).aborted == ("reader",)


def test_a_free_page_is_held_by_nobody_though_its_former_tag_was_put_back():
    pool = Pool()
    pool.begin(0, range(4), [3])
    own = pool.tracker.lift(numbers(3))
    pool.tracker.release(numbers(3))
    pool.tracker.land(numbers(3), own)
    pool.tracker.cache(numbers(3), numbers(0), numbers(0))
    assert faults(pool.run(2)) == [(Fault.FREED, "holder", "r0", 3)]


def test_what_a_node_keeps_is_its_own():
    """Whoever asked may use his tensors for something else."""
    pool = Pool()
    pool.begin(0, range(4), [3])
    rows, indices = numbers(0), numbers(0)
    held = pool.tracker.cache(numbers(3), rows, indices)
    indices.fill_(2)
    pool.tracker.sent(numbers(3), held)
    assert pool.run(0).violations == ()
