"""Whom a line names: each use of a row has a number, which stands in the line."""

import pytest

from quantkit.kv_guard.faults import Fault
from quantkit.kv_guard.tracker import Mode, Step
from tests.kv_guard.pools import Pool, faults, numbers


def test_an_event_of_a_row_that_was_opened_anew_within_a_step_names_whose_it_was():
    """Neither its next request, nor nobody."""
    pool = Pool()
    pool.begin(0, range(4), [3], request="former")
    pool.tracker.release(numbers(3))
    pool.tracker.cache(numbers(3), numbers(0), numbers(0))
    pool.tracker.close(0)
    pool.begin(0, range(50, 54), [5], request="next")
    verdict = pool.run(0)
    assert faults(verdict) == [(Fault.FREED, "holder", "former", 3)]
    assert verdict.aborted == ("former",)


def test_a_grant_names_the_request_that_the_row_had_by_then():
    pool = Pool()
    pool.begin(1, range(4), [3])
    pool.begin(0, range(50, 54), [3], request="former")
    pool.tracker.close(0)
    pool.begin(0, range(60, 64), [5], request="next")
    assert faults(pool.run(0)) == [(Fault.GRANTED_TWICE, "grant", "former", 3)]


def test_what_a_step_read_is_the_requests_that_had_the_row_when_it_was_launched():
    pool = Pool()
    pool.begin(0, range(4), [3], request="former")
    step = pool.launch(0)
    pool.tracker.release(numbers(3))
    pool.tracker.close(0)
    pool.begin(0, range(50, 54), [3], request="next")
    pool.tracker.after_step()
    assert [one[1:3] for one in faults(pool.tracker.verdict(step))] == [("after_step", "former")]


@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_name_is_kept_for_the_lines_of_one_step(is_cleared):
    pool = Pool()
    for number in range(9):
        pool.begin(0, range(4), [3], request=f"r{number}")
        pool.run(0)
        if is_cleared:
            pool.tracker.clear()
        else:
            pool.end(0, 3)
    assert len(pool.tracker._verdicts.openings._names) <= 2


@pytest.mark.parametrize("mode", [Mode.LOG, Mode.ABORT])
def test_a_row_that_is_opened_for_a_second_request_is_a_violation_of_both(mode):
    pool = Pool(mode=mode)
    pool.begin(0, range(4), [3], request="former")
    pool.begin(0, range(50, 54), [5], request="next")
    verdict = pool.run(0)
    assert [one[:3] for one in faults(verdict)] == [(Fault.ROW_TAKEN, "opening", who) for who in ("former", "next")]
    assert verdict.violations[0].text.startswith("request former, row 0: ")
    assert verdict.aborted == (("former", "next") if mode is Mode.ABORT else ())


def test_rows_are_opened_again_behind_a_close_or_a_clear():
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.end(0, 3)
    pool.begin(0, range(4), [3])
    pool.tracker.clear()
    pool.begin(0, range(4), [3])
    assert pool.run(0).violations == ()


def step_of(pool, length, most_pages, firsts=None):
    return Step(
        table=pool.table,
        rows=numbers(0),
        lengths=numbers(length),
        firsts=None if firsts is None else numbers(firsts),
        most_pages=most_pages,
    )


@pytest.mark.parametrize(
    ("length", "most_pages", "first"), [(9, 2, None), (16, 3, None), (1, 0, None), (16, 2, 1), (16, 2, 2), (16, 2, 9)]
)
@pytest.mark.parametrize("is_pruned", [False, True])
def test_a_row_that_is_longer_than_the_engine_said(length, most_pages, first, is_pruned):
    """The pages behind are not looked at, so that nobody can say that they are right."""
    pool = Pool(null_page=0)
    pool.begin(0, range(16), [3, 4, 5, 6])
    if is_pruned and most_pages:
        pool.tracker.prune(numbers(0), numbers(most_pages))
        pool.table[0, :most_pages] = 0
    number = pool.tracker.before_step(step_of(pool, length, most_pages, first))
    pool.tracker.after_step()
    expected = [(Fault.BEYOND, "before_step"), (Fault.BEYOND, "after_step")] if most_pages else []
    found = [one[:2] for one in faults(pool.tracker.verdict(number))]
    assert [one for one in found if one[0] != Fault.NEVER_GRANTED] == expected


def test_the_last_page_is_read_wherever_a_window_begins():
    pool = Pool()
    pool.begin(0, range(16), [3, 4, 5, 6])
    pool.tracker.release(numbers(6))
    number = pool.tracker.before_step(step_of(pool, 16, 4, firsts=9))
    pool.tracker.after_step()
    assert [one[0] for one in faults(pool.tracker.verdict(number))] == [Fault.FREED] * 2


def test_of_a_row_that_is_named_twice_the_stricter_entry_counts():
    pool = Pool()
    pool.begin(0, range(16), [3, 4, 5, 6])
    pool.begin(1, range(50, 66), [7, 8, 9, 10])
    pool.tracker.truncate(numbers(0, 1, 0), numbers(1, 4, 3))
    pool.tracker.prune(numbers(1, 0, 1), numbers(3, 0, 1))
    named = {(one.request, one.evidence.index) for one in pool.run(0, 1).violations}
    assert named == {("r0", 1), ("r0", 2), ("r0", 3), ("r1", 0), ("r1", 1), ("r1", 2)}


@pytest.mark.parametrize("call", ["truncate", "prune"])
def test_a_row_that_is_closed_expects_nothing_whatever_is_said_of_it(call):
    """Null pages stand in it as in padding."""
    pool = Pool(null_page=0)
    pool.begin(0, range(16), [3, 4, 5, 6])
    pool.tracker.close(0)
    getattr(pool.tracker, call)(numbers(0), numbers(2))
    pool.table[0] = 0
    assert pool.run(0).violations == ()


def test_a_row_that_is_closed_is_nobodys():
    """In the step of its end, too, whose lines may still speak of its request."""
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.tracker.close(0)
    assert [one[:3] for one in faults(pool.run(0))] == [
        (Fault.NEVER_GRANTED, check, None) for check in ("before_step", "after_step")
    ]


def test_rows_expect_nothing_behind_a_clear():
    """Null pages stand in them as in padding."""
    pool = Pool(null_page=0)
    pool.begin(0, range(4), [3])
    pool.tracker.clear()
    pool.table[0] = 0
    assert pool.run(0).violations == ()


@pytest.mark.parametrize("row", [-1, 3, 4])
def test_a_row_that_is_nobodys_ends_the_whole_batch(row):
    """Its tokens may be anybody's."""
    pool = Pool()
    pool.begin(0, range(4), [3])
    step = Step(table=pool.table, rows=numbers(row, 0), lengths=numbers(4, 4), most_pages=1)
    number = pool.tracker.before_step(step)
    pool.tracker.after_step()
    assert pool.tracker.verdict(number).aborted == ("r0",)
