"""Transfers that are over before they came, each by its number; and pages that wait while others write there."""

import pytest

from quantkit.kv_guard.faults import Fault
from quantkit.kv_guard.tracker import Held
from tests.kv_guard.pools import PAGE_SIZE, Pool, faults, numbers


def sent(page=7):
    """Tags of a prefill's page, which holds the prompt of 0 to 3."""
    prefill = Pool()
    prefill.begin(0, range(4), [page])
    return prefill.tracker.lift(numbers(page))


def write(pool, slot, row, position):
    pool.tracker.check_writes(numbers(slot), numbers(row), numbers(position))


def arrive(pool):
    pool.tracker.arrive(numbers(3), numbers(0), numbers(0))


@pytest.mark.parametrize("is_first_over", [False, True])
def test_the_end_of_one_transfer_is_not_that_of_another_to_the_same_page(is_first_over):
    pool = Pool()
    for row, transfer in ((0, 1), (1, 2)):
        pool.begin(row, range(4), [3])
        pool.tracker.announce(numbers(3), transfer)
        pool.end(row, 3)
    pool.tracker.drained(numbers(3), 2)
    if is_first_over:
        pool.tracker.drained(numbers(3), 1)
    pool.run(2)
    pool.begin(0, range(50, 54), [3])
    found = [] if is_first_over else [(Fault.LANDING, "landing", "r0", 3)]
    assert faults(pool.run(0))[:1] == found


def test_the_end_of_a_former_transfer_does_not_end_the_one_that_a_page_waits_for():
    """Or its holder would read what has not come."""
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.tracker.announce(numbers(3), 1)
    pool.end(0, 3)
    pool.tracker.forget_transfers(numbers(3))
    pool.run(2)
    pool.begin(0, range(4), [3])
    pool.tracker.announce(numbers(3), 2)
    pool.tracker.drained(numbers(3), 1)
    assert faults(pool.run(0))[0] == (Fault.NOT_ARRIVED, "before_step", "r0", 3)


def test_a_transfer_that_is_announced_again_is_not_taken_for_come_by_what_the_first_one_left():
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.tracker.announce(numbers(3), 1)
    pool.tracker.land(numbers(3), sent())
    pool.tracker.drained(numbers(3), 1)
    pool.tracker.announce(numbers(3), 2)
    arrive(pool)
    assert faults(pool.run(0))[0] == (Fault.NOT_ARRIVED, "arrival", "r0", 3)
    pool.tracker.announce(numbers(3), 3)
    pool.tracker.land(numbers(3), sent())
    arrive(pool)
    assert pool.run(0).violations == ()


@pytest.mark.parametrize("is_over_by", ["arrive", "drained"])
def test_a_token_that_was_stored_while_a_transfer_was_under_way_is_seen_behind_its_tags(is_over_by):
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.begin(1, range(50, 54), [5])
    pool.tracker.announce(numbers(3), 1)
    pool.tracker.land(numbers(3), sent())
    write(pool, 3 * PAGE_SIZE, 1, 0)
    pool.tracker.land(numbers(3), sent())  # the second time, behind the content
    if is_over_by == "arrive":
        arrive(pool)
    else:
        pool.tracker.drained(numbers(3), 1)
    found = faults(pool.run(0))
    assert (Fault.SPOILED, "before_step", "r0", 3) in found
    assert ((Fault.SPOILED, "arrival", "r0", 3) in found) == (is_over_by == "arrive")


def test_what_is_not_held_by_one_row_alone_awaits_no_transfer():
    """A free page, one that others read, one that waits already, and one that is named twice."""
    pool = Pool()
    pool.begin(0, range(16), [3, 4, 5, 6])
    pool.tracker.cache(numbers(3), numbers(0), numbers(0))
    pool.tracker.announce(numbers(4), 1)
    pool.tracker.announce(numbers(9, 3, 4, 5, 5), 2)
    found = [(one.fault, one.evidence.page) for one in pool.tracker.settle().violations]
    assert found == [(Fault.FREED, 9), (Fault.WRITE_TO_SHARED, 3), (Fault.LANDING, 4), (Fault.LANDING, 5)]
    pool.tracker.drained(numbers(4), 2)
    assert [one[::3] for one in faults(pool.run(0))[:2]] == [(Fault.SPOILED, 3), (Fault.NOT_ARRIVED, 4)]


def test_a_page_that_is_reserved_twice_in_one_call():
    pool = Pool()
    pool.tracker.reserve(numbers(5, 6, 5), 1)
    assert [(one.fault, one.evidence.page) for one in pool.tracker.settle().violations] == [(Fault.GRANTED_TWICE, 5)]


def test_the_end_of_a_transfer_that_a_page_waits_for_is_not_that_of_a_former_one():
    pool = Pool()
    for row, transfer in ((0, 1), (1, 2)):
        pool.begin(row, range(4), [3])
        pool.tracker.announce(numbers(3), transfer)
        if row == 1:
            pool.tracker.drained(numbers(3), 2)
        pool.end(row, 3)
    pool.run(2)
    pool.begin(0, range(50, 54), [3])
    assert faults(pool.run(0))[0] == (Fault.LANDING, "landing", "r0", 3)


def test_who_held_a_page_that_was_reserved_reads_nothing_there_though_the_copy_was_given_up():
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.tracker.reserve(numbers(3), 1)
    pool.tracker.drained(numbers(3), 1)
    assert [one[:2] for one in faults(pool.run(0))] == [
        (Fault.GRANTED_TWICE, "grant"),
        (Fault.NOT_ARRIVED, "before_step"),
        (Fault.NOT_ARRIVED, "after_step"),
    ]


def test_a_transfer_whose_end_is_told_twice_does_not_end_the_next_one():
    pool = Pool()
    for row, transfer in ((0, 1), (1, 2)):
        pool.begin(row, range(4), [3])
        pool.tracker.announce(numbers(3), transfer)
        pool.end(row, 3)
        for _ in range(2 if row == 0 else 0):
            pool.tracker.drained(numbers(3), transfer)
    pool.run(2)
    pool.begin(0, range(50, 54), [3])
    assert faults(pool.run(0))[0] == (Fault.LANDING, "landing", "r0", 3)


def test_a_token_that_was_stored_in_a_free_page_is_no_landing():
    """Whoever gets the page writes over it, where transfers are looked for, too."""
    pool = Pool()
    pool.begin(0, range(4), [5])
    pool.begin(1, range(50, 54), [6])
    pool.tracker.announce(numbers(5), 1)
    write(pool, 3 * PAGE_SIZE, 1, 0)
    pool.run(2)
    pool.begin(2, range(70, 74), [3])
    assert pool.run(2).violations == ()


def test_a_token_that_was_stored_in_a_reserved_page_is_seen_by_who_reads_the_node():
    pool = Pool()
    pool.begin(1, range(50, 54), [5])
    pool.tracker.reserve(numbers(3), 1)
    pool.tracker.land(numbers(3), sent())
    write(pool, 3 * PAGE_SIZE, 1, 0)
    pool.tracker.land(numbers(3), sent())
    held = pool.tracker.store(
        numbers(3), Held(generations=numbers(1), owners=pool.owners(range(4), "r0"), indices=numbers(0))
    )
    pool.tracker.open(2, "r2")
    pool.tracker.share(numbers(2), numbers(0), held)
    pool.table[2, 0], pool.lengths[2] = 3, 4
    assert (Fault.SPOILED, "before_step", "r2", 3) in faults(pool.run(2))


def test_what_is_said_to_have_come_to_a_free_page_makes_nobody_its_holder():
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.tracker.release(numbers(3))
    arrive(pool)
    pool.run(2)
    pool.begin(1, range(50, 54), [3])
    assert pool.run(1).violations == ()


@pytest.mark.parametrize("is_over", [False, True])
def test_a_reserved_page_is_released_when_its_copy_is_over(is_over):
    pool = Pool()
    pool.tracker.reserve(numbers(3), 1)
    if is_over:
        pool.tracker.drained(numbers(3), 1)
    pool.tracker.release(numbers(3))
    assert [one.fault for one in pool.tracker.settle().violations] == ([] if is_over else [Fault.LANDING])


def test_a_page_waits_for_its_first_transfer_where_another_was_refused():
    pool = Pool()
    pool.begin(0, range(4), [3])
    for transfer in (1, 2):
        pool.tracker.announce(numbers(3), transfer)
    pool.tracker.drained(numbers(3), 2)
    found = [(one.fault, one.check) for one in pool.run(0).violations]
    assert found[1:] == [(Fault.NOT_ARRIVED, "before_step"), (Fault.NOT_ARRIVED, "after_step")]


def next_holder(pool, page=3):
    pool.run(3)
    pool.begin(1, range(50, 54), [page])
    return faults(pool.run(1))[:1]


@pytest.mark.parametrize("state", ["free", "shared", "waiting", "reserved"])
def test_a_transfer_that_was_announced_wrongly_may_write_until_it_is_over(state):
    """Whoever has the page next is named; so is whoever reads it before."""
    pool = Pool()
    if state == "reserved":
        pool.tracker.reserve(numbers(3), 1)
    elif state != "free":
        pool.begin(0, range(4), [3])
    if state == "shared":
        pool.tracker.cache(numbers(3), numbers(0), numbers(0))
    if state == "waiting":
        pool.tracker.announce(numbers(3), 1)
    pool.tracker.announce(numbers(3), 2)
    if state in ("waiting", "reserved"):
        pool.tracker.drained(numbers(3), 1)
    if state != "free":
        if state != "reserved":
            assert (Fault.SPOILED, "before_step", "r0", 3) in faults(pool.run(0))
            pool.tracker.close(0)
        pool.tracker.release(numbers(3))
    assert next_holder(pool) == [(Fault.LANDING, "landing", "r1", 3)]
    pool.end(1, 3)
    pool.tracker.drained(numbers(3), 2)
    assert next_holder(pool) == []


@pytest.mark.parametrize("call", ["reserve", "grant"])
def test_a_page_that_waits_and_is_handed_on_is_not_forgotten(call):
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.tracker.announce(numbers(3), 1)
    if call == "reserve":
        pool.tracker.reserve(numbers(3), 2)
        pool.tracker.drained(numbers(3), 2)
    else:
        pool.begin(2, range(4), [3])
    pool.tracker.release(numbers(3))
    assert next_holder(pool) == [(Fault.LANDING, "landing", "r1", 3)]
