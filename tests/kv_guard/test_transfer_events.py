"""Pages that others write beside the stream, or copy; rows and tokens that are where they do not belong."""

import pytest
import torch

from quantkit.kv_guard.faults import Fault
from quantkit.kv_guard.tracker import Held, Step
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
    pool.tracker.release(numbers(5, 6))
    pool.begin(1, range(50, 56), [5, 6])  # whoever gets the page next writes over it
    assert pool.run(1).violations == ()


@pytest.mark.parametrize("slot", [-1, 0, 4 * PAGE_SIZE + 1])
def test_padding_and_a_rows_own_token_spoil_nothing(slot):
    pool = Pool(null_page=0)
    pool.begin(0, range(6), [3, 4])
    write(pool, slot, 0, 5)
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


def test_a_page_that_is_released_while_a_transfer_may_write_there_is_nobodys_until_it_is_drained():
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.tracker.announce(numbers(3))
    pool.tracker.release(numbers(3))
    for tokens in (range(50, 54), range(60, 64)):
        pool.begin(1, tokens, [3])
        assert (Fault.LANDING, "landing", "r1", 3) in faults(pool.run(1))
        pool.tracker.release(numbers(3))
    pool.tracker.drained(numbers(3))
    pool.begin(1, range(70, 74), [3])
    assert pool.run(1).violations == ()


def test_nobody_shares_what_a_late_transfer_may_write_over():
    """A node comes back from the host to such a page: no request is concerned, and its readers come later."""
    one = HostAndPool()
    host_held = one.host.tracker.store(numbers(5), one.held)
    one.pool.begin(1, range(50, 54), [4])
    one.pool.tracker.announce(numbers(4))
    one.pool.tracker.release(numbers(4))
    one.pool.tracker.reserve(numbers(4))
    one.pool.tracker.land(numbers(4), one.host.tracker.send(numbers(5), host_held))
    held = one.pool.tracker.store(numbers(4), host_held)
    one.pool.tracker.drained(numbers(4))
    one.pool.tracker.open(2, "r2")
    one.pool.tracker.share(numbers(2), numbers(0), held)
    one.pool.table[2, 0], one.pool.lengths[2] = 4, 4
    assert (Fault.SPOILED, "before_step", "r2", 4) in faults(one.pool.run(2))


@pytest.mark.parametrize("is_over_by", ["drained", "arrive"])
def test_a_transfer_that_is_over_leaves_nothing_behind(is_over_by):
    prefill, decode = Pool(), Pool()
    for pool, page in ((prefill, 7), (decode, 3)):
        pool.begin(0, range(4), [page])
    decode.tracker.announce(numbers(3))
    held = prefill.tracker.cache(numbers(7), numbers(0), numbers(0))
    decode.tracker.land(numbers(3), prefill.tracker.send(numbers(7), held))
    if is_over_by == "arrive":
        decode.tracker.arrive(numbers(3), numbers(0), numbers(0))
        assert decode.run(0).violations == ()
    else:
        decode.tracker.drained(numbers(3))
    decode.tracker.release(numbers(3))
    decode.begin(1, range(50, 54), [3])
    assert decode.run(1).violations == ()


def test_clearing_does_not_end_a_transfer():
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.tracker.announce(numbers(3))
    pool.tracker.clear()
    pool.begin(1, range(50, 54), [3])
    assert (Fault.LANDING, "landing", "r1", 3) in faults(pool.run(1))


def test_a_page_in_which_something_landed_while_it_was_free():
    """What was announced had come; it is sent once more, and its content may follow."""
    prefill, decode = Pool(), Pool()
    for pool, page in ((prefill, 7), (decode, 3)):
        pool.begin(0, range(4), [page])
    decode.tracker.announce(numbers(3))
    late = prefill.tracker.lift(numbers(7))
    decode.tracker.land(numbers(3), late)
    decode.tracker.arrive(numbers(3), numbers(0), numbers(0))
    decode.tracker.release(numbers(3))
    decode.tracker.land(numbers(3), late)
    decode.begin(1, range(50, 54), [3])
    assert faults(decode.run(1))[0] == (Fault.LANDING, "landing", "r1", 3)


class HostAndPool:
    """Page 3 of a pool, which a node of its cache holds, and page 5 of the host's memory."""

    def __init__(self, checksums=None):
        self.pool, self.host = Pool(), Pool()
        self.pool.begin(0, range(4), [3])
        self.held = self.pool.tracker.cache(numbers(3), numbers(0), numbers(0))
        self.host.tracker.reserve(numbers(5))
        self.host.tracker.land(numbers(5), self.pool.tracker.send(numbers(3), self.held, checksums))

    def host_faults(self):
        return [(one.fault, one.check) for one in self.host.tracker.settle().violations]


def test_a_node_goes_to_the_host_and_comes_back():
    one = HostAndPool(numbers(77))
    host_held = one.host.tracker.store(numbers(5), one.held, numbers(77))
    one.pool.tracker.sent(numbers(3), one.held)
    assert one.host_faults() == []
    one.pool.tracker.close(0)
    one.pool.tracker.release(numbers(3))
    one.pool.tracker.reserve(numbers(9))
    one.pool.tracker.land(numbers(9), one.host.tracker.send(numbers(5), host_held))
    held = one.pool.tracker.store(numbers(9), host_held, numbers(77))
    one.host.tracker.sent(numbers(5), host_held)
    assert one.host_faults() == []
    one.pool.tracker.open(1, "r1")
    one.pool.tracker.share(numbers(1), numbers(0), held)
    one.pool.table[1, 0], one.pool.lengths[1] = 9, 4
    assert one.pool.run(1).violations == ()


def test_what_a_node_expects_of_a_copy_is_not_taken_from_the_copy():
    one = HostAndPool()
    one.pool.begin(1, range(50, 54), [4])
    one.host.tracker.land(numbers(5), one.pool.tracker.lift(numbers(4)))
    one.host.tracker.store(numbers(5), one.held)
    assert one.host_faults() == [(Fault.OTHER_OWNER, "arrival")]


def test_a_copy_that_was_torn_on_the_way():
    one = HostAndPool(numbers(77))
    one.host.tracker.store(numbers(5), one.held, numbers(78))
    assert one.host_faults() == [(Fault.CONTENT, "content")]


def test_a_copy_that_has_not_come():
    host = Pool()
    host.tracker.reserve(numbers(5))
    host.tracker.store(numbers(5), Held(generations=numbers(1), owners=numbers(2), indices=numbers(0)))
    assert [one.fault for one in host.tracker.settle().violations] == [Fault.NOT_ARRIVED]


def test_a_source_that_is_given_to_another_while_it_is_read():
    one = HostAndPool()
    host_held = one.host.tracker.store(numbers(5), one.held)
    one.host.tracker.send(numbers(5), host_held)
    one.host.tracker.release(numbers(5))
    one.host.tracker.sent(numbers(5), host_held)
    assert one.host_faults() == [(Fault.FREED, "holder")]


def test_a_page_that_is_reserved_twice():
    one = HostAndPool()
    one.host.tracker.reserve(numbers(5))
    assert one.host_faults() == [(Fault.GRANTED_TWICE, "grant")]


def test_a_fork_that_copies_what_is_not_its_parents():
    pool = Pool()
    pool.begin(0, range(6), [3, 4])
    pool.tracker.open(1, "r1")
    for is_given_away, expected in ((False, []), (True, [(Fault.FREED, "holder", "r1", 4)])):
        if is_given_away:
            pool.tracker.release(numbers(4))
        pool.tracker.copied(numbers(4), numbers(0), numbers(1), numbers(1))
        assert [one for one in faults(pool.run(2)) if one[1] == "holder"] == expected


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


OUTSIDE = pytest.mark.parametrize("page", [-1, 16, 1 << 40])


@OUTSIDE
@pytest.mark.parametrize("call", ["cache", "move", "copied", "sent", "send", "fork", "arrive", "reserve", "store"])
def test_who_holds_or_is_given_a_page_that_the_pool_does_not_have(call, page):
    """Once transfers were announced, too. It is a violation, and no other page is another."""
    pool = Pool()
    pool.begin(0, range(8), [3, 4])
    pool.begin(1, range(50, 54), [15])
    pool.tracker.announce(numbers(4))
    before = [one.clone() for one in (pool.tracker.tags.seals_P, pool.tracker.tags.states_P)]
    pages, row, index = numbers(page), numbers(0), numbers(0)
    held = Held(generations=numbers(1), owners=numbers(2), indices=index)
    arguments = {
        "cache": (pages, row, index),
        "move": (pages, numbers(page), row, index),
        "copied": (pages, row, index, numbers(1)),
        "arrive": (pages, row, index, numbers(5)),
        "fork": (0, 1, pages),
        "reserve": (pages,),
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
    pool.tracker.announce(numbers(page, page))
    pool.tracker.drained(numbers(page))
    pool.tracker.land(numbers(page, page), pool.tracker.lift(numbers(15, page)))
    pool.begin(1, range(50, 54), [page])
    pool.tracker.release(numbers(page))
    assert [one.fault for one in pool.tracker.settle().violations] == [Fault.OUTSIDE_POOL] * 2
    assert pool.run(0).violations == ()


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
    assert pool.tracker.own_pages(row, index, numbers(7)).tolist() == [-1]
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


def announced():
    """A prefill's page 7 and its tags, and row 0 of a decode that waits for them in page 3."""
    prefill, decode = Pool(), Pool()
    for pool, page in ((prefill, 7), (decode, 3)):
        pool.begin(0, range(4), [page])
    decode.tracker.announce(numbers(3))
    return decode, prefill.tracker.lift(numbers(7))


@pytest.mark.parametrize("has_landed", [False, True])
def test_what_waits_for_a_transfer_is_neither_read_nor_passed_on(has_landed):
    decode, tags = announced()
    if has_landed:
        decode.tracker.land(numbers(3), tags)
    fault = Fault.OTHER_PAGE if has_landed else Fault.NOT_ARRIVED
    assert [one[:3] for one in faults(decode.run(0))] == [(fault, when, "r0") for when in ("before_step", "after_step")]
    row, index, page = numbers(0), numbers(0), numbers(3)
    held = decode.tracker.cache(page, row, index)
    decode.tracker.sent(page, held)
    decode.tracker.copied(page, row, index, numbers(1))
    decode.tracker.fork(0, 1, page)
    decode.tracker.move(page, numbers(9), row, index)
    checks = [one[:2] for one in faults(decode.run(2))]
    assert checks == [(fault, "holder")] * 5 + [(Fault.LANDING, "landing")]


def test_a_transfer_that_was_announced_and_arrived_is_read():
    decode, tags = announced()
    decode.tracker.land(numbers(3), tags)
    decode.tracker.land(numbers(3), tags)  # behind the content
    decode.tracker.arrive(numbers(3), numbers(0), numbers(0))
    assert decode.run(0).violations == ()


def test_a_transfer_that_was_announced_and_is_wrongly_said_to_have_come():
    decode, _ = announced()
    decode.tracker.arrive(numbers(3), numbers(0), numbers(0))
    assert [one[:2] for one in faults(decode.run(0))] == [
        (Fault.NOT_ARRIVED, check) for check in ("arrival", "before_step", "after_step")
    ]


def test_what_lands_behind_the_arrival_fails_the_next_check():
    decode, tags = announced()
    decode.tracker.land(numbers(3), tags)
    decode.tracker.arrive(numbers(3), numbers(0), numbers(0))
    decode.tracker.land(numbers(3), tags)
    assert faults(decode.run(0))[0] == (Fault.OTHER_PAGE, "before_step", "r0", 3)


def test_content_behind_a_release_is_found_by_its_second_tag():
    """The first had landed before: the page was announced, said to be drained, and is another's by now."""
    decode, tags = announced()
    decode.tracker.land(numbers(3), tags)
    decode.tracker.drained(numbers(3))
    decode.tracker.release(numbers(3))
    decode.begin(1, range(50, 54), [3])
    assert decode.run(1).violations == ()
    decode.tracker.land(numbers(3), tags)
    assert faults(decode.run(1))[0] == (Fault.OTHER_PAGE, "before_step", "r1", 3)


def test_a_row_computes_what_a_transfer_that_was_given_up_did_not_bring():
    """Of two pages one had come: that is not the row's any more."""
    prefill, decode = Pool(), Pool()
    for pool, pages in ((prefill, [7, 8]), (decode, [3, 4])):
        pool.begin(0, range(8), pages)
    decode.tracker.announce(numbers(3, 4))
    decode.tracker.land(numbers(4), prefill.tracker.lift(numbers(8)))
    decode.tracker.drained(numbers(3, 4))
    assert [one[::3] for one in faults(decode.run(0))] == [(Fault.OTHER_PAGE, 4)] * 2


def test_a_page_that_was_spoiled_before_it_is_announced_stays_so():
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.tracker.announce(numbers(3))
    pool.tracker.release(numbers(3))
    pool.begin(1, range(50, 54), [3])
    pool.tracker.announce(numbers(3))
    pool.tracker.drained(numbers(3))
    assert (Fault.SPOILED, "before_step", "r1", 3) in faults(pool.run(1))


def test_what_a_row_may_give_back_while_it_waits_for_a_transfer():
    decode, _ = announced()
    decode.begin(1, range(50, 54), [5])
    assert decode.tracker.own_pages(0, 0, numbers(3)).tolist() == [3]
    assert decode.tracker.own_pages(0, 0, numbers(5)).tolist() == [3]
    assert decode.tracker.own_pages(1, 0, numbers(3)).tolist() == [5]


def test_what_landed_in_a_page_that_was_released_is_no_arrival():
    prefill, decode = Pool(), Pool()
    for pool, page in ((prefill, 7), (decode, 3)):
        pool.begin(0, range(4), [page])
    decode.tracker.release(numbers(3))
    decode.tracker.land(numbers(3), prefill.tracker.lift(numbers(7)))
    decode.tracker.arrive(numbers(3), numbers(0), numbers(0))
    assert faults(decode.run(0))[0][1:] == ("arrival", "r0", 3)
