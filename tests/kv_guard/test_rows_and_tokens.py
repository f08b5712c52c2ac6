"""Rows and tokens that are where they do not belong, and null pages where they may stand or not."""

import pytest
import torch

from quantkit.kv_guard.faults import Fault
from quantkit.kv_guard.tracker import Step
from tests.kv_guard.pools import PAGE_SIZE, Pool, faults, numbers


def write(pool, slot, row, position):
    pool.tracker.check_writes(numbers(slot), numbers(row), numbers(position))


def test_a_token_in_another_requests_page_spoils_it_for_that_one():
    """The step runs all the same, so that its victim must not go on."""
    pool = Pool()
    pool.begin(0, range(6), [3, 4])
    pool.begin(1, range(50, 56), [5, 6])
    step = pool.launch(0, 1)
    write(pool, 6 * PAGE_SIZE + 1, 0, 5)
    pool.tracker.after_step()
    verdict = pool.tracker.verdict(step)
    assert faults(verdict) == [(Fault.OTHER_OWNER, "write", "r0", 6), (Fault.SPOILED, "after_step", "r1", 6)]
    assert verdict.aborted == ("r0", "r1")
    pool.end(1, 5, 6)
    pool.begin(1, range(50, 56), [5, 6])  # whoever gets the page next writes over it
    assert pool.run(1).violations == ()


def test_where_a_node_kept_nothing_no_null_page_stands():
    """Of the first page's, too: it is not as in a row that nobody has opened."""
    pool = Pool(null_page=0)
    pool.begin(0, range(4), [3])
    write(pool, 9 * PAGE_SIZE, 0, 0)
    held = pool.tracker.cache(numbers(3), numbers(0), numbers(0))
    pool.tracker.open(1, "r1")
    pool.tracker.share(numbers(1), numbers(0), held)
    pool.table[1, 0], pool.lengths[1] = 0, 4
    assert (Fault.NEVER_GRANTED, "before_step", "r1", 0) in faults(pool.run(1))


@pytest.mark.parametrize(("slot", "row"), [(-1, 0), (0, 2), (4 * PAGE_SIZE + 1, 0)])
def test_padding_and_a_rows_own_token_spoil_nothing(slot, row):
    pool = Pool(null_page=0)
    pool.begin(0, range(6), [3, 4])
    write(pool, slot, row, 5)
    assert pool.run(0).violations == ()


@pytest.mark.parametrize("slot", [0, 6 * PAGE_SIZE + 1, 4 * PAGE_SIZE + 2])
def test_a_token_that_was_stored_elsewhere_leaves_a_hole_for_all_who_read_there(slot):
    """In the null page, in another's, in its own at another offset. What lies in its place is somebody's former token:
    neither the row nor whoever it passes the page on to may read it."""
    pool = Pool(null_page=0)
    pool.begin(0, range(8), [3, 4])
    pool.begin(1, range(50, 56), [5, 6])
    step = pool.launch(0)
    write(pool, slot, 0, 5)
    pool.tracker.after_step()
    held = pool.tracker.cache(numbers(3, 4), numbers(0, 0), numbers(0, 1))
    pool.tracker.open(2, "r2")
    pool.tracker.share(numbers(2, 2), numbers(0, 1), held)
    pool.table[2, :2], pool.lengths[2] = torch.tensor([3, 4]), 8
    assert "r0" in pool.tracker.verdict(step).aborted
    verdict = pool.run(0, 2)
    assert (Fault.HOLE, "before_step", "r0", 4) in faults(verdict)
    assert [one[1] for one in faults(verdict) if one[2] == "r2"] == ["before_step", "after_step"]
    pool.end(0, 3, 4)
    pool.begin(0, range(8), [3, 4])
    assert pool.run(0).violations == ()


def test_a_token_in_a_page_that_others_share_spoils_it_for_all():
    pool = Pool()
    pool.begin(0, range(8), [3, 4])
    held = pool.tracker.cache(numbers(3), numbers(0), numbers(0))
    pool.tracker.open(1, "r1")
    pool.tracker.share(numbers(1), numbers(0), held)
    pool.table[1, 0], pool.lengths[1] = 3, 4
    write(pool, 3 * PAGE_SIZE, 0, 0)
    assert pool.run(0, 1).aborted == ("r0", "r1")


def test_a_null_page_stands_only_where_nothing_is_expected():
    """Not where an open row was granted nothing: there a page is missing."""
    pool = Pool(null_page=0)
    pool.begin(0, range(4), [3])
    pool.lengths[0], pool.lengths[1] = 8, 8
    assert faults(pool.run(0, 1))[0] == (Fault.NEVER_GRANTED, "before_step", "r0", 0)
    assert pool.run(1).violations == ()  # a row that is not open: padding
    pool.tracker.close(0)
    pool.table[0] = 0
    assert pool.run(0).violations == ()


def test_pages_that_a_window_has_left_are_not_expected():
    pool = Pool(null_page=0)
    pool.begin(0, range(12), [3, 4, 5])
    pool.tracker.prune(numbers(0), numbers(2))
    pool.tracker.release(numbers(3, 4))
    pool.table[0, :2] = 0
    assert pool.run(0).violations == ()
    pool.table[0, 2] = 0
    assert faults(pool.run(0))[0][0] == Fault.FREED


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize(("first", "is_read"), [(None, False), (3, False), (2, True)])
def test_a_null_page_from_the_first_on_that_a_step_reads_is_no_padding(first, is_read, by_token):
    """Where a row expects nothing any more, and the kernel reads the null page as data. A row that nobody has opened
    is padding in the same batch."""
    pool = Pool(null_page=0)
    pool.begin(0, range(16), [3, 4, 5, 6])
    pool.tracker.prune(numbers(0), numbers(3))
    pool.tracker.release(numbers(3, 4, 5))
    pool.table[0, :3] = 0
    table = (pool.table[:, :, None].long() * PAGE_SIZE + torch.arange(PAGE_SIZE)).view(4, 16)
    table[1:] = 0  # of rows that are closed
    step = Step(
        table=table if by_token else pool.table,
        rows=numbers(0, 1),
        lengths=numbers(16, 16),
        firsts=None if first is None else numbers(first, 0),
        most_pages=4,
        by_token=by_token,
    )
    number = pool.tracker.before_step(step)
    pool.tracker.after_step()
    expected = [(Fault.NEVER_GRANTED, when, "r0", 0) for when in ("before_step", "after_step")] if is_read else []
    assert faults(pool.tracker.verdict(number)) == expected


@pytest.mark.parametrize("while_it_runs", [False, True])
def test_a_row_that_is_shifted_within_a_page(while_it_runs):
    """By a token: the page is the row's own."""
    pool = Pool()
    pool.begin(0, range(8), [3, 4])
    table = torch.zeros(4, 16, dtype=torch.int64)
    table[0, :8] = torch.arange(3 * PAGE_SIZE, 5 * PAGE_SIZE)
    step = Step(table=table, rows=numbers(0), lengths=numbers(8), most_pages=2, by_token=True, is_steady=True)
    if not while_it_runs:
        table[0, 4:8] += 1
    number = pool.tracker.before_step(step)
    if while_it_runs:
        table[0, 4:8] += 1
    pool.tracker.after_step()
    checks = ("after_step",) if while_it_runs else ("before_step", "after_step")
    assert faults(pool.tracker.verdict(number)) == [(Fault.SHIFTED, check, "r0", 4) for check in checks]


def test_pages_behind_a_truncation_are_missing():
    pool = Pool(null_page=0)
    pool.begin(0, range(12), [3, 4, 5])
    pool.tracker.truncate(numbers(0), numbers(2))
    assert [one[::3] for one in faults(pool.run(0))] == [(Fault.NEVER_GRANTED, 5)] * 2


def test_a_row_that_is_rewritten_while_the_step_runs():
    for is_steady, expected in ((True, [(Fault.OTHER_OWNER, "after_step", "r0", 5)]), (False, [])):
        pool = Pool()
        pool.begin(0, range(8), [3, 4])
        pool.begin(1, range(50, 54), [5])
        step = Step(table=pool.table, rows=numbers(0), lengths=numbers(8), most_pages=2, is_steady=is_steady)
        number = pool.tracker.before_step(step)
        pool.table[0, 1] = 5
        pool.tracker.after_step()
        assert faults(pool.tracker.verdict(number)) == expected


def test_a_row_that_is_read_again_by_token():
    pool = Pool()
    pool.begin(0, range(8), [3, 4])
    table = torch.zeros(4, 16, dtype=torch.int64)
    table[0, :8] = torch.arange(3 * PAGE_SIZE, 5 * PAGE_SIZE)
    step = Step(table=table, rows=numbers(0), lengths=numbers(8), most_pages=2, by_token=True, is_steady=True)
    for moved_to, expected in ((4, []), (9, [(Fault.FREED, "after_step", "r0", 9)])):
        number = pool.tracker.before_step(step)
        table[0, 4:8] = moved_to * PAGE_SIZE
        pool.tracker.after_step()
        assert faults(pool.tracker.verdict(number)) == expected


@pytest.mark.parametrize("entry", [-1, -7, 16, (1 << 32) + 3])
def test_a_row_that_names_no_page_while_the_step_runs(entry):
    pool = Pool()
    pool.begin(0, range(4), [3])
    table = torch.tensor([[3]] + [[0]] * 3)
    step = Step(table=table, rows=numbers(0), lengths=numbers(4), most_pages=1, is_steady=True)
    number = pool.tracker.before_step(step)
    table[0, 0] = entry
    pool.tracker.after_step()
    assert [one.fault for one in pool.tracker.verdict(number).violations] == [Fault.OUTSIDE_POOL]


def test_what_a_rows_former_request_was_granted_is_not_the_next_ones():
    """Neither to cache, nor to copy, nor to move."""
    pool = Pool()
    pool.begin(1, range(4), [3])
    pool.tracker.close(1)
    pool.tracker.open(1, "next")
    held = pool.tracker.cache(numbers(3), numbers(1), numbers(0))
    pool.tracker.copied(numbers(3), numbers(1), numbers(0), numbers(1))
    pool.tracker.open(2, "reader")
    pool.tracker.share(numbers(2), numbers(0), held)
    pool.table[2, 0], pool.lengths[2] = 3, 4
    checks = [(one.check, one.request) for one in pool.run(2).violations]
    assert checks == [("holder", "next"), ("holder", "next"), ("before_step", "reader"), ("after_step", "reader")]


def test_a_violation_of_a_row_that_is_nobodys_ends_all_that_are_open():
    """As where a guard was attached late: whose tokens it concerns nobody knows."""
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.table[1, 0], pool.lengths[1] = 5, 4
    verdict = pool.run(0, 1)
    assert [one.request for one in verdict.violations] == [None, None]
    assert verdict.aborted == ("r0",)


def test_where_violations_were_lost_all_that_were_open_are_aborted():
    pool = Pool(ring_lines=3)
    pool.begin(0, range(16), [3, 4, 5, 6])
    pool.begin(1, range(50, 54), [7])
    pool.tracker.release(numbers(3, 4, 5, 6))
    verdict = pool.run(0, 1)
    assert verdict.lost
    assert verdict.aborted == ("r0", "r1")


def test_a_written_page_that_is_granted_anew_before_the_verdict_is_its_new_holders():
    """It was released behind the write: who has it by then writes over what was stored there."""
    pool = Pool()
    pool.begin(0, range(6), [3, 4])
    pool.begin(1, range(50, 56), [5, 6])
    write_step = pool.launch(0)
    write(pool, 6 * PAGE_SIZE + 1, 0, 5)
    pool.tracker.after_step()
    pool.tracker.release(numbers(5, 6))
    pool.begin(2, range(70, 76), [6, 5])
    next_step = pool.launch(2)
    pool.tracker.after_step()
    assert pool.tracker.verdict(write_step).aborted == ("r0",)
    assert pool.tracker.verdict(next_step).violations == ()
    assert pool.run(2).violations == ()
