"""Copies between a pool and the host's memory: what comes has its owner and its place, and is written no more."""

from quantkit.kv_guard.faults import Fault
from quantkit.kv_guard.tracker import Held
from tests.kv_guard.pools import PAGE_SIZE, Pool, faults, numbers


def tags_of(owner, index):
    """What a page of another pool brings, which was granted there to an owner at a place."""
    other = Pool()
    other.tracker.open(0, "r0")
    other.tracker.grant(numbers(7), numbers(0), numbers(index), owner)
    return other.tracker.lift(numbers(7))


def test_a_transfer_that_brings_the_right_owners_page_of_another_place():
    """As where a row is sent off by a page: an owner is a prefix, and none has two places but by mistake."""
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.tracker.land(numbers(3), tags_of(pool.owners(range(4), "r0"), 1))
    pool.tracker.arrive(numbers(3), numbers(0), numbers(0))
    assert faults(pool.run(0))[0] == (Fault.MISPLACED, "arrival", "r0", 3)


def stored(owner, index):
    """A node's page 3, of owner 12 at place 0, in a pool; what came is another's, or stands elsewhere."""
    pool = Pool()
    pool.tracker.reserve(numbers(3), 1)
    pool.tracker.land(numbers(3), tags_of(numbers(owner), index))
    sent = Held(generations=numbers(1), owners=numbers(12), indices=numbers(0))
    held = pool.tracker.store(numbers(3), sent)
    pool.tracker.open(1, "r1")
    pool.tracker.share(numbers(1), numbers(0), held)
    pool.table[1, 0], pool.lengths[1] = 3, 4
    return pool


def test_a_copy_that_brings_another_owner_or_another_place():
    assert [one.check for one in stored(12, 1).run(2).violations] == ["arrival"]
    assert [one.check for one in stored(13, 0).run(2).violations] == ["arrival"]


def test_what_has_come_back_from_the_host_is_written_no_more():
    pool = stored(12, 0)
    assert pool.run(1).violations == ()
    pool.tracker.check_writes(numbers(3 * PAGE_SIZE), numbers(1), numbers(0))
    assert faults(pool.run(1))[0] == (Fault.WRITE_TO_SHARED, "write", "r1", 3)


def test_what_is_sent_is_summed_where_a_transfer_reads_it():
    """The tags that it lifts bear the sum, and a page that came with another one is nobody's from then on."""
    prefill = Pool()
    prefill.begin(0, range(4), [7])
    held = prefill.tracker.cache(numbers(7), numbers(0), numbers(0))
    prefill.tracker.send(numbers(7), held, checksums=numbers(77))
    for sum_there, checks in ((77, []), (78, ["before_step", "after_step"])):
        pool = Pool()
        pool.begin(0, range(4), [3])
        pool.tracker.land(numbers(3), prefill.tracker.lift(numbers(7)))
        pool.tracker.arrive(numbers(3), numbers(0), numbers(0), numbers(sum_there))
        pool.run(2)
        assert [one.check for one in pool.run(0).violations] == checks
