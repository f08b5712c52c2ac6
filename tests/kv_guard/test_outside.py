"""Pages, rows and places that the pool does not have."""

import pytest
import torch

from quantkit.kv_guard.faults import Fault
from quantkit.kv_guard.tracker import Held, Step
from tests.kv_guard.pools import PAGE_SIZE, Pool, faults, numbers

OUTSIDE = pytest.mark.parametrize("page", [-1, 16, 1 << 40])


@OUTSIDE
@pytest.mark.parametrize(
    "call", ["cache", "move", "copied", "sent", "send", "fork", "announce", "arrive", "reserve", "store"]
)
def test_who_holds_or_is_given_a_page_that_the_pool_does_not_have(call, page):
    """Once transfers were announced, too. It is a violation, and no other page is another."""
    pool = Pool()
    pool.begin(0, range(8), [3, 4])
    pool.begin(1, range(50, 54), [15])
    pool.tracker.announce(numbers(4), 9)
    before = [one.clone() for one in (pool.tracker.tags.seals_P, pool.tracker.tags.states_P)]
    pages, row, index = numbers(page), numbers(0), numbers(0)
    held = Held(generations=numbers(1), owners=numbers(2), indices=index)
    arguments = {
        "cache": (pages, row, index),
        "move": (pages, numbers(page), row, index),
        "copied": (pages, row, index, numbers(1)),
        "announce": (pages, 9),
        "arrive": (pages, row, index, numbers(5)),
        "fork": (0, 1, pages),
        "reserve": (pages, 9),
        "store": (pages, held, numbers(5)),
    }
    getattr(pool.tracker, call)(*arguments.get(call, (pages, held)))
    violations = pool.tracker.settle().violations
    assert violations
    assert {(one.fault, one.evidence.page) for one in violations} == {(Fault.OUTSIDE_POOL, page)}
    assert all(map(torch.equal, before, (pool.tracker.tags.seals_P, pool.tracker.tags.states_P)))


@OUTSIDE
def test_events_of_which_nothing_can_be_said_leave_every_page_as_it_is(page):
    pool = Pool()
    pool.begin(0, range(4), [15])
    pool.tracker.announce(numbers(15), 9)
    pool.tracker.drained(numbers(15), 9)
    pool.tracker.drained(numbers(page), 9)
    pool.tracker.land(numbers(page, page), pool.tracker.lift(numbers(15, page)))
    pool.begin(1, range(50, 54), [page])
    pool.tracker.release(numbers(page))
    assert [one.fault for one in pool.tracker.settle().violations] == [Fault.OUTSIDE_POOL] * 2
    assert pool.run(0).violations == ()


@OUTSIDE
@pytest.mark.parametrize("index", [0, 1])
def test_who_was_granted_nothing_holds_no_page_outside_the_pool(page, index):
    pool = Pool()
    pool.tracker.open(0, "r0")
    pool.tracker.cache(numbers(page), numbers(0), numbers(index))
    assert [(one.check, one.evidence.page) for one in pool.tracker.settle().violations] == [("holder", page)]


@pytest.mark.parametrize(("row", "index"), [(-1, 0), (4, 0), (0, -1), (0, 4), (1 << 40, 0)])
def test_rows_and_places_that_there_are_none_of_expect_nothing(row, index):
    pool = Pool()
    pool.begin(0, range(16), [3, 4, 5, 6])
    pool.begin(3, range(50, 54), [7])
    pages, rows, indices = numbers(5), numbers(row), numbers(index)
    held = pool.tracker.cache(pages, rows, indices)
    assert [one.check for one in pool.tracker.settle().violations] == ["holder"]
    pool.tracker.share(rows, indices, held)
    pool.tracker.arrive(pages, rows, indices)
    assert [one.check for one in pool.tracker.settle().violations] == ["arrival"]
    assert pool.tracker.own_pages(row, index, 1).tolist() == [-1]
    if index == 0:
        pool.tracker.truncate(rows, numbers(0))
        pool.tracker.prune(rows, numbers(4))
        pool.tracker.open(row, "nobody")
        pool.tracker.close(row)
    assert pool.run(0, 3).violations == ()


@pytest.mark.parametrize("row", [-1, 9])
def test_a_row_beyond_the_table_that_is_read_again(row):
    pool = Pool()
    pool.begin(0, range(4), [3])
    step = Step(table=pool.table, rows=numbers(0, row), lengths=numbers(4, 4), most_pages=1, is_steady=True)
    number = pool.tracker.before_step(step)
    pool.tracker.after_step()
    assert [(one.check, one.row) for one in pool.tracker.verdict(number).violations] == [
        ("before_step", row if row >= 0 else None)
    ]


@pytest.mark.parametrize("page", [16, 1 << 40])
def test_a_token_in_a_page_that_the_pool_does_not_have(page):
    """Of a row that is not open, which expects nothing there either."""
    pool = Pool()
    pool.tracker.check_writes(numbers(page * PAGE_SIZE), numbers(1), numbers(0))
    assert faults(pool.run(2))[0] == (Fault.OUTSIDE_POOL, "write", None, page)
