"""Pages that others write beside the stream, or copy: what waits for them, what comes late."""

import pytest

from quantkit.kv_guard.faults import Fault
from quantkit.kv_guard.tracker import Held
from tests.kv_guard.pools import Pool, faults, numbers


def test_a_page_that_is_released_while_a_transfer_may_write_there_is_nobodys_until_it_is_drained():
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.tracker.announce(numbers(3), 9)
    pool.tracker.release(numbers(3))
    for tokens in (range(50, 54), range(60, 64)):
        pool.begin(1, tokens, [3])
        assert (Fault.LANDING, "landing", "r1", 3) in faults(pool.run(1))
        pool.end(1, 3)
    pool.tracker.drained(numbers(3), 9)
    pool.begin(1, range(70, 74), [3])
    assert pool.run(1).violations == ()


def test_nobody_shares_what_a_late_transfer_may_write_over():
    """A node comes back from the host to such a page: no request is concerned, and its readers come later."""
    one = HostAndPool()
    host_held = one.host.tracker.store(numbers(5), one.held)
    one.pool.begin(1, range(50, 54), [4])
    one.pool.tracker.announce(numbers(4), 9)
    one.pool.tracker.release(numbers(4))
    one.pool.tracker.reserve(numbers(4), 9)
    one.pool.tracker.land(numbers(4), one.host.tracker.send(numbers(5), host_held))
    held = one.pool.tracker.store(numbers(4), host_held)
    one.pool.tracker.drained(numbers(4), 9)
    one.pool.tracker.open(2, "r2")
    one.pool.tracker.share(numbers(2), numbers(0), held)
    one.pool.table[2, 0], one.pool.lengths[2] = 4, 4
    assert (Fault.SPOILED, "before_step", "r2", 4) in faults(one.pool.run(2))


@pytest.mark.parametrize("is_over_by", ["drained", "arrive"])
def test_a_transfer_that_is_over_leaves_nothing_behind(is_over_by):
    prefill, decode = Pool(), Pool()
    for pool, page in ((prefill, 7), (decode, 3)):
        pool.begin(0, range(4), [page])
    decode.tracker.announce(numbers(3), 9)
    held = prefill.tracker.cache(numbers(7), numbers(0), numbers(0))
    decode.tracker.land(numbers(3), prefill.tracker.send(numbers(7), held))
    if is_over_by == "arrive":
        decode.tracker.arrive(numbers(3), numbers(0), numbers(0))
        assert decode.run(0).violations == ()
    else:
        decode.tracker.drained(numbers(3), 9)
    decode.tracker.release(numbers(3))
    decode.begin(1, range(50, 54), [3])
    assert decode.run(1).violations == ()


def test_clearing_does_not_end_a_transfer():
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.tracker.announce(numbers(3), 9)
    pool.tracker.clear()
    pool.begin(1, range(50, 54), [3])
    assert (Fault.LANDING, "landing", "r1", 3) in faults(pool.run(1))


def test_a_page_in_which_something_landed_while_it_was_free():
    """What was announced had come; it is sent once more, and its content may follow."""
    prefill, decode = Pool(), Pool()
    for pool, page in ((prefill, 7), (decode, 3)):
        pool.begin(0, range(4), [page])
    decode.tracker.announce(numbers(3), 9)
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
        self.host.tracker.reserve(numbers(5), 9)
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
    one.pool.tracker.reserve(numbers(9), 9)
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
    host.tracker.reserve(numbers(5), 9)
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
    one.host.tracker.reserve(numbers(5), 9)
    assert one.host_faults() == [(Fault.LANDING, "landing"), (Fault.GRANTED_TWICE, "grant")]


def test_a_fork_that_copies_what_is_not_its_parents():
    pool = Pool()
    pool.begin(0, range(6), [3, 4])
    pool.tracker.open(1, "r1")
    for is_given_away, expected in ((False, []), (True, [(Fault.FREED, "holder", "r1", 4)])):
        if is_given_away:
            pool.tracker.release(numbers(4))
        pool.tracker.copied(numbers(4), numbers(0), numbers(1), numbers(1))
        assert [one for one in faults(pool.run(2)) if one[1] == "holder"] == expected


def announced():
    """A prefill's page 7 and its tags, and row 0 of a decode that waits for them in page 3."""
    prefill, decode = Pool(), Pool()
    for pool, page in ((prefill, 7), (decode, 3)):
        pool.begin(0, range(4), [page])
    decode.tracker.announce(numbers(3), 9)
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
    decode.tracker.drained(numbers(3), 9)
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
    decode.tracker.announce(numbers(3, 4), 9)
    decode.tracker.land(numbers(4), prefill.tracker.lift(numbers(8)))
    decode.tracker.drained(numbers(3, 4), 9)
    assert [one[::3] for one in faults(decode.run(0))] == [(Fault.OTHER_PAGE, 4)] * 2


def test_a_page_that_was_spoiled_before_it_is_announced_stays_so():
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.tracker.announce(numbers(3), 9)
    pool.tracker.release(numbers(3))
    pool.begin(1, range(50, 54), [3])
    pool.tracker.announce(numbers(3), 9)
    pool.tracker.drained(numbers(3), 9)
    assert (Fault.SPOILED, "before_step", "r1", 3) in faults(pool.run(1))


def test_what_a_row_may_give_back_while_it_waits_for_a_transfer():
    decode, _ = announced()
    decode.begin(1, range(50, 54), [5])
    assert decode.tracker.own_pages(0, 0, 1).tolist() == [3]
    assert decode.tracker.own_pages(0, 0, 1).tolist() == [3]
    assert decode.tracker.own_pages(1, 0, 1).tolist() == [5]


def test_what_a_row_holds():
    """The second page is another's, and the third the row was never granted."""
    pool = Pool()
    pool.begin(0, range(6), [3, 4])
    pool.begin(1, range(50, 56), [5, 6])
    holds = pool.tracker.holds(numbers(3, 6, 7), numbers(0, 0, 0), numbers(0, 1, 2))
    assert holds.tolist() == [True, False, False]
    found = [(one.fault, one.check, one.request, one.evidence.page) for one in pool.tracker.settle().violations]
    assert [one[1:] for one in found] == [("holder", None, 6), ("holder", None, 7)]


def test_what_landed_in_a_page_that_was_released_is_no_arrival():
    prefill, decode = Pool(), Pool()
    for pool, page in ((prefill, 7), (decode, 3)):
        pool.begin(0, range(4), [page])
    decode.tracker.release(numbers(3))
    decode.tracker.land(numbers(3), prefill.tracker.lift(numbers(7)))
    decode.tracker.arrive(numbers(3), numbers(0), numbers(0))
    assert faults(decode.run(0))[0][1:] == ("arrival", "r0", 3)
