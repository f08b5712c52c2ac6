"""Verdicts that are asked for late, or never; steps that are told out of order; whose rows they were."""

import pytest

from quantkit.kv_guard.settings import GuardSettings
from quantkit.kv_guard.tracker import KvGuardError
from quantkit.kv_guard.verdicts import MOST_WAITING
from tests.kv_guard.pools import IDENTITY, Pool, numbers


def pool_of_three():
    """Rows 0 to 2, of a page each."""
    pool = Pool()
    for row in range(3):
        pool.begin(row, range(10 * row, 10 * row + 4), [row + 3])
    return pool


def checked(pool, *rows):
    step = pool.launch(*rows)
    pool.tracker.after_step()
    return step


def test_who_is_named_by_a_verdict_that_nobody_asked_for_is_in_the_next_one():
    pool = pool_of_three()
    pool.tracker.release(numbers(3, 4))
    checked(pool, 1)
    checked(pool, 0)
    step = checked(pool, 2, 1)
    verdict = pool.tracker.verdict(step)
    assert {one.request for one in verdict.violations} == {"r1"}
    assert verdict.aborted == ("r1", "r0")
    assert pool.run(2).aborted == ()


def test_verdicts_that_nobody_reads_are_not_kept_for_ever():
    pool = pool_of_three()
    pool.tracker.release(numbers(3))
    first = checked(pool, 0)
    for _ in range(MOST_WAITING):
        last = checked(pool, 2)
    with pytest.raises(KvGuardError, match=f"step {first} was not checked, or its verdict was read"):
        pool.tracker.verdict(first)
    assert pool.tracker.metrics.checks == 1
    assert pool.tracker.verdict(first + 1).aborted == ("r0",)
    assert pool.tracker.verdict(last).aborted == ()


def test_whoever_is_owed_to_nobody_is_told_when_events_are_settled():
    pool = pool_of_three()
    pool.tracker.release(numbers(3))
    for row in (0, *[2] * MOST_WAITING):
        checked(pool, row)
    assert pool.tracker.settle().aborted == ("r0",)


def test_a_step_is_not_launched_before_the_one_ahead_was_checked_behind_it():
    """What the first has read would be forgotten."""
    pool = pool_of_three()
    pool.launch(0)
    with pytest.raises(KvGuardError, match="before the one ahead of it") as caught:
        pool.launch(1)
    assert "after_step" in (caught.value.remedy or "")
    pool.tracker.after_step()
    assert pool.run(1).violations == ()


def test_rows_have_no_names_behind_a_clear():
    pool = pool_of_three()
    pool.tracker.clear()
    assert dict(pool.tracker.names) == {}
    assert [(one.row, one.request) for one in pool.run(0).violations] == [(0, None)] * 2


@pytest.mark.parametrize("first", [0, -1, 1 << 64])
def test_nothing_is_granted_under_generation_0(first):
    with pytest.raises(KvGuardError, match=f"a first generation of {first}"):
        GuardSettings(identity=IDENTITY, size=Pool().tracker.settings.size, first_generation=first).check()
