"""A pool's life, event by event: what is allowed passes, and each fault is named with its request, page and step."""

import pytest
import torch

from quantkit.kv_guard.faults import Fault
from quantkit.kv_guard.identity import Chains, PoolIdentity
from quantkit.kv_guard.tracker import KvGuardError, Mode
from tests.kv_guard.pools import PAGE_SIZE, Pool, faults, numbers


def test_a_row_that_passes_to_another_while_a_step_runs():
    """What the step read was the former's, what happens behind it is the next one's."""
    pool = Pool()
    pool.begin(0, range(4), [3])
    step = pool.launch(0)
    pool.tracker.release(numbers(3))
    pool.tracker.close(0)
    pool.begin(0, range(50, 54), [5], request="next")
    pool.tracker.release(numbers(5))
    pool.tracker.cache(numbers(5), numbers(0), numbers(0))
    pool.tracker.after_step()
    verdict = pool.tracker.verdict(step)
    assert [(one.check, one.request) for one in verdict.violations] == [("holder", "next"), ("after_step", "r0")]
    assert verdict.aborted == ("next", "r0")


def test_what_a_row_was_granted_passes():
    pool = Pool()
    pool.begin(0, range(10), [3, 4, 5])
    pool.begin(1, range(50, 54), [6])
    verdict = pool.run(0, 1)
    assert (verdict.violations, verdict.lost, verdict.aborted) == ((), 0, ())
    assert pool.tracker.metrics.pages == 12


def test_a_page_that_was_released_is_named_before_the_step_with_its_request():
    pool = Pool()
    pool.begin(0, range(10), [3, 4, 5])
    pool.begin(1, range(50, 54), [6])
    pool.tracker.release(numbers(4))
    verdict = pool.run(0, 1)
    assert faults(verdict) == [(Fault.FREED, "before_step", "r0", 4), (Fault.FREED, "after_step", "r0", 4)]
    assert verdict.aborted == ("r0",)


def test_a_page_that_was_granted_again_for_the_same_prefix_is_stale():
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.tracker.release(numbers(3))
    pool.begin(1, range(4), [3])
    assert [one[0] for one in faults(pool.run(0))] == [Fault.GRANTED_ANEW] * 2
    assert pool.run(1).violations == ()


def test_a_row_at_another_requests_intact_page():
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.begin(1, range(10, 14), [4])
    pool.table[0, 0] = 4
    assert faults(pool.run(0, 1))[0] == (Fault.OTHER_OWNER, "before_step", "r0", 4)


def test_a_row_that_is_shifted_by_a_page():
    pool = Pool()
    pool.begin(0, range(8), [3, 4])
    pool.table[0, :2] = torch.tensor([4, 3])
    assert [one[:2] for one in faults(pool.run(0))][:2] == [(Fault.OTHER_OWNER, "before_step")] * 2


def test_a_page_that_the_row_was_never_granted():
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.lengths[0] = 8
    assert faults(pool.run(0))[0] == (Fault.NEVER_GRANTED, "before_step", "r0", 0)


@pytest.mark.parametrize("page", [-3, 16, 2**31 - 1])
def test_a_page_outside_the_pool_is_no_address(page):
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.table[0, 0] = page
    assert faults(pool.run(0)) == [(Fault.OUTSIDE_POOL, check, "r0", page) for check in ("before_step", "after_step")]


@pytest.mark.parametrize("page", [-1, 16])
def test_what_an_allocator_names_outside_the_pool_is_no_address(page):
    pool = Pool()
    before = pool.tracker.tags.seals_P.clone()
    pool.begin(0, range(4), [page])
    pool.tracker.release(numbers(page))
    assert faults(pool.run(1)) == [
        (Fault.OUTSIDE_POOL, "grant", "r0", page),
        (Fault.OUTSIDE_POOL, "release", None, page),
    ]
    assert torch.equal(pool.tracker.tags.seals_P, before)


def test_a_transfer_that_lands_during_the_step_is_seen_behind_it():
    """In a page that was granted anew, while the transfer to its former holder was on its way."""
    prefill, decode = Pool(), Pool()
    prefill.begin(0, range(4), [7])
    held = prefill.tracker.cache(numbers(7), numbers(0), numbers(0))
    late = prefill.tracker.send(numbers(7), held)
    decode.begin(0, range(90, 94), [5])
    step = decode.launch(0)
    decode.tracker.land(numbers(5), late)
    decode.tracker.after_step()
    assert faults(decode.tracker.verdict(step)) == [(Fault.OTHER_PAGE, "after_step", "r0", 5)]


def test_a_release_that_is_ordered_behind_the_step_is_none_of_its_business():
    pool = Pool()
    pool.begin(0, range(4), [3])
    step = pool.launch(0)
    pool.tracker.after_step()
    pool.tracker.release(numbers(3))
    pool.begin(1, range(90, 94), [3])
    assert pool.tracker.verdict(step).violations == ()


@pytest.mark.parametrize("pages", [[[3, 3]], [[3], [3]]])
def test_a_page_that_is_released_twice(pages):
    pool = Pool()
    pool.begin(0, range(8), [3, 4])
    for some in pages:
        pool.tracker.release(numbers(*some))
    assert faults(pool.run(1)) == [(Fault.FREED_TWICE, "release", None, 3)]


@pytest.mark.parametrize("pages", [[5, 5], [3, 5]])
def test_a_page_that_is_granted_while_it_is_held(pages):
    pool = Pool()
    pool.begin(0, range(4), [3])
    pool.begin(1, range(20, 28), pages)
    assert (Fault.GRANTED_TWICE, "grant", "r1", pages[0]) in faults(pool.run(0))


def test_a_transfer_that_brings_another_requests_first_page():
    """Both begin a prompt: their first pages have nothing before them."""
    prefill, decode = Pool(), Pool()
    for row, tokens in enumerate((range(4), range(60, 64))):
        prefill.begin(row, tokens, [row + 7])
        decode.begin(row, tokens, [row + 2])
    held = [prefill.tracker.cache(numbers(row + 7), numbers(row), numbers(0)) for row in (0, 1)]
    for row, sent in ((0, 0), (1, 0)):
        decode.tracker.land(numbers(row + 2), prefill.tracker.send(numbers(sent + 7), held[sent]))
        decode.tracker.arrive(numbers(row + 2), numbers(row), numbers(0))
    verdict = decode.run(0, 1)
    assert faults(verdict)[0] == (Fault.OTHER_OWNER, "arrival", "r1", 3)
    assert verdict.aborted == ("r1",)  # and it fails from here on
    assert prefill.run(0, 1).violations == ()


def test_a_transfer_that_has_not_landed():
    decode = Pool()
    decode.begin(0, range(4), [3])
    decode.tracker.arrive(numbers(3), numbers(0), numbers(0))
    assert faults(decode.run(0)) == [(Fault.NOT_ARRIVED, "arrival", "r0", 3)]


def test_a_checksum_of_32_bits_has_no_sign():
    """One with its highest bit is negative as int32, and is the same."""
    prefill, decode = Pool(), Pool()
    for pool, page in ((prefill, 7), (decode, 3)):
        pool.begin(0, range(4), [page])
    held = prefill.tracker.cache(numbers(7), numbers(0), numbers(0))
    sums = numbers(-5).int()
    decode.tracker.land(numbers(3), prefill.tracker.send(numbers(7), held, checksums=sums))
    decode.tracker.arrive(numbers(3), numbers(0), numbers(0), checksums=sums)
    assert decode.run(0).violations == ()


@pytest.mark.parametrize("sum_there", [77, 78])
def test_a_checksum_travels_with_the_tag(sum_there):
    prefill, decode = Pool(), Pool()
    for pool, page in ((prefill, 7), (decode, 3)):
        pool.begin(0, range(4), [page])
    held = prefill.tracker.cache(numbers(7), numbers(0), numbers(0))
    decode.tracker.land(numbers(3), prefill.tracker.send(numbers(7), held, checksums=numbers(77)))
    decode.tracker.arrive(numbers(3), numbers(0), numbers(0), checksums=numbers(sum_there))
    assert [one[:2] for one in faults(decode.run(0))][:1] == ([(Fault.CONTENT, "content")] if sum_there == 78 else [])


def test_a_stolen_page_behind_a_prefix_hit():
    """Evicted between the look-up and the request's first step: the node says what it was."""
    pool = Pool()
    pool.begin(0, range(8), [3, 4])
    held = pool.tracker.cache(numbers(3, 4), numbers(0, 0), numbers(0, 1))
    pool.tracker.close(0)
    pool.tracker.release(numbers(3, 4))
    pool.begin(2, range(70, 78), [4, 3])
    pool.tracker.open(1, "r1")
    pool.tracker.share(numbers(1, 1), numbers(0, 1), held)
    pool.table[1, :2], pool.lengths[1] = torch.tensor([3, 4]), 8
    verdict = pool.run(1, 2)
    assert [one[:3] for one in faults(verdict)] == [
        (Fault.OTHER_OWNER, c, "r1") for c in ("before_step",) * 2 + ("after_step",) * 2
    ]
    assert verdict.aborted == ("r1",)


def test_what_a_row_may_give_back_is_its_own():
    """Its page under another name, one that was overwritten, none for a page that was freed or that is another's."""
    pool = Pool()
    pool.begin(0, range(16), [3, 4, 5, 6])
    pool.begin(1, range(50, 54), [7])
    pool.tracker.release(numbers(5))
    pool.tracker.land(numbers(6), numbers(11, 12, 13, 1).reshape(1, 4))
    assert pool.tracker.own_pages(0, 0, 4).tolist() == [3, 4, -1, 6]
    assert pool.tracker.own_pages(0, 2, 2).tolist() == [-1, 6]
    assert pool.tracker.own_pages(2, 0, 2).tolist() == [-1, -1]


def test_a_page_that_was_written_to_by_another_passes_for_nobody():
    pool = Pool()
    pool.begin(0, range(8), [3, 4])
    held = pool.tracker.cache(numbers(3, 4), numbers(0, 0), numbers(0, 1))
    pool.begin(1, range(90, 94), [5])
    pool.tracker.open(2, "r2")
    pool.tracker.share(numbers(2, 2), numbers(0, 1), held)
    pool.tracker.check_writes(numbers(4 * PAGE_SIZE), numbers(1), numbers(0))
    assert pool.tracker.own_pages(0, 1, 1).tolist() == [4]
    pool.table[2, :2], pool.lengths[2] = torch.tensor([3, 4]), 8
    verdict = pool.run(0, 1, 2)
    named = {(one.request, one.check, one.evidence.page) for one in verdict.violations}
    assert named == {("r1", "write", 4)} | {
        (who, when, page)
        for who, page in (("r0", 4), ("r2", 4), ("r1", 5))  # and where r1's token should be is a hole
        for when in ("before_step", "after_step")
    }


@pytest.mark.parametrize("num_left", [16, 20])  # the first 16 are those of free pages
def test_generations_are_counted_round(num_left):
    pool = Pool(first_generation=(1 << 64) - num_left)
    for tokens in range(0, 100, 10):
        pool.begin(0, range(tokens, tokens + 8), [3, 4])
        assert pool.run(0).violations == ()
        assert not (pool.tracker.tags.records_P3[:, 0] == 0).any()
        pool.end(0, 3, 4)


def test_halt_raises_and_log_goes_on():
    for mode, aborted in ((Mode.LOG, ()), (Mode.ABORT, ("r0",))):
        pool = Pool(mode=mode)
        pool.begin(0, range(4), [3])
        pool.tracker.release(numbers(3))
        assert pool.run(0).aborted == aborted
    pool = Pool(mode=Mode.HALT)
    pool.begin(0, range(4), [3])
    pool.tracker.release(numbers(3))
    with pytest.raises(KvGuardError, match="r0, physical page 3: the page was released"):
        pool.run(0)


def test_a_ring_that_is_full_counts_the_rest():
    pool = Pool(ring_lines=3)
    pool.begin(0, range(16), [3, 4, 5, 6])
    pool.tracker.release(numbers(3, 4, 5, 6))
    verdict = pool.run(0)
    assert (len(verdict.violations), verdict.lost) == (3, 5)
    assert pool.tracker.metrics.lost == 5
    assert pool.run(1).lost == 0


def test_keys_bind_each_part():
    parts = {"model": "a", "layout": "b", "pool": "c"}
    keys = {PoolIdentity(**parts).key(b"")} | {PoolIdentity(**parts | {name: "x"}).key(b"") for name in parts}
    keys |= {PoolIdentity(**parts).key(b"x")}
    assert len(keys) == 5
    assert PoolIdentity(model="ab", layout="c").key(b"") != PoolIdentity(model="a", layout="bc").key(b"")
    chains = [Chains(key).of_prompt(range(10), 4, "r") for key in sorted(keys)]
    assert len({chain for some in chains for chain in some}) == 15


def test_owners_cannot_be_guessed_from_what_is_written():
    """Model, layout and pool stand in incidents; with them alone a prompt that is guessed is not confirmed."""
    pools = [Pool(secret=None), Pool(secret=None), Pool(), Pool()]
    owners = [int(pool.owners(range(4), "r")[0]) for pool in pools]
    assert owners[2] == owners[3]
    assert len(set(owners)) == 3
    assert "of two sides" not in repr(pools[2].tracker.settings)


def test_an_allocator_in_another_process_names_the_generations():
    """None of the pool's own are drawn for it."""
    pool = Pool(first_generation=1)
    pool.tracker.open(0, "r0")
    for first, page in ((900, 3), (None, 4)):
        pool.tracker.grant(numbers(page), numbers(0), numbers(page - 3), numbers(page), first)
    assert pool.tracker.tags.records_P3[3:5, 0].tolist() == [900, 1 + pool.tracker.tags.num_pages]
