"""Faults in SGLang's own state: who is affected is ended before a wrong token is sent, and the others go on."""

import pytest
import torch

from quantkit.kv_guard.faults import Fault
from quantkit.kv_guard.tracker import KvGuardError, Mode
from tests.kv_guard.engines.small_sglang.places import srt

PROMPT, OTHER = list(range(10, 23)), list(range(100, 115))
SIZE = 4


def ended(serving):
    aborted = srt("managers.schedule_batch").FINISH_ABORT
    return {rid for rid, reason in serving.ended.items() if isinstance(reason, aborted)}


def faults(serving):
    return {fault for fault, count in serving.guard.pool.tracker.metrics.violations.items() if count}


def assert_ended(serving, *rids):
    """These were ended without a token too many; nobody was sent a wrong one; no page is lost."""
    assert ended(serving) == set(rids)
    assert all("KV cache" in serving.ended[rid].message for rid in rids)
    assert serving.wrong() == []
    assert serving.num_lost() == 0


def two_running(serve, num_steps=2, **how):
    serving = serve(**how)
    requests = serving.submit("a", PROMPT, num_steps + 4), serving.submit("b", OTHER, num_steps + 4)
    for _ in range(num_steps):
        serving.step(*requests)
    return serving, *requests


def row(serving, req):
    return serving.rows.req_to_token[req.kv.req_pool_idx]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_that_names_anothers_page(serve, overlap):
    """Kind 4. The row is mended before it is given back: the other's page stays the other's."""
    serving, a, b = two_running(serve, num_steps=6, overlap=overlap)
    row(serving, a)[12:16] = row(serving, b)[12:16]  # both full, and neither the cache's
    serving.finish(a, b)
    assert faults(serving) == {Fault.OTHER_OWNER}
    assert_ended(serving, "a")
    assert len(serving.sent["a"]) == 6
    assert len(serving.sent["b"]) == 10


def test_a_page_that_is_gone_is_not_given_back(serve):
    """It was freed under its request: another has it by now, or will."""
    serving, a, b = two_running(serve, num_steps=6)
    serving.allocator.free_segment(row(serving, a)[12:16], start_pos=0)
    serving.finish(a, b)
    assert_ended(serving, "a")
    serving.finish(serving.submit("c", [*range(300, 330)]))
    assert_ended(serving, "a")


def test_nothing_of_a_condemned_request_is_cached(serve):
    serving, a, b = two_running(serve)
    kept = len(serving.guard.pool.kept)
    serving.guard.condemned.add(["a"])
    srt("mem_cache.common").release_kv_cache(a, serving.tree, checkpoint=True)
    assert len(serving.guard.pool.kept) == kept
    serving.finish(b)
    assert not serving.guard.condemned


def test_a_row_that_is_shifted_by_a_page(serve):
    """Kind 10."""
    serving, a, b = two_running(serve)
    row(serving, a)[4:12] = row(serving, a)[:8].clone()
    serving.finish(a, b)
    assert_ended(serving, "a")


def test_an_old_tail_in_a_row(serve):
    """Kind 4: the page of a request that has ended, in the place of the newest."""
    serving, a, b = two_running(serve)
    tail = row(serving, a)[12:16].clone()
    serving.finish(a)
    row(serving, b)[12:16] = tail
    serving.finish(b)
    assert faults(serving) <= {Fault.FREED, Fault.OTHER_OWNER}
    assert_ended(serving, "b")


@pytest.mark.parametrize("in_group", [False, True])
def test_a_page_that_is_freed_twice(serve, in_group):
    """Kind 6: named as it is freed; where it is granted to two, both are ended."""
    serving, a, b = two_running(serve)
    freed = row(serving, a)
    serving.finish(a, b)
    page = freed[16:17].long() // SIZE
    if in_group:
        serving.allocator.free_group_begin()
    serving.allocator.free_page_ids(page)
    if in_group:
        serving.allocator.free_group_end()
    serving.finish(serving.submit("c", [7, 8], 1))
    assert faults(serving) == {Fault.FREED_TWICE}
    assert serving.ended.keys() == {"a", "b", "c"}


def test_a_page_of_two_owners(serve):
    """Kind 6, behind the second grant."""
    serving, a, b = two_running(serve)
    serving.allocator.free_pages[:1] = row(serving, a)[12] // SIZE
    serving.step(serving.submit("c", [7, 8, 9], 3))
    serving.finish(a, b)
    assert Fault.GRANTED_TWICE in faults(serving)
    assert (serving.sent["c"], len(serving.sent["a"])) == ([], 2)
    assert ended(serving) >= {"a", "c"}  # and whoever was given the page by then
    assert serving.wrong() == []


def test_a_row_that_names_anothers_page_in_a_mixed_batch(serve):
    serving, a, b = two_running(serve, num_steps=6)
    row(serving, a)[12:16] = row(serving, b)[12:16]
    new = serving.submit("new", [1, 2, 3, 4, 5], 3)
    serving.process(serving.mix(new, a, b))
    serving.finish(new, b)
    assert_ended(serving, "a")
    assert (len(serving.sent["a"]), len(serving.sent["new"])) == (6, 3)


def test_a_tag_that_lands_while_a_step_runs(serve):
    """Kinds 1 and 2: a late transfer into a page that was granted anew is seen behind the step that read it."""
    serving, a, b = two_running(serve)
    tracker = serving.guard.pool.tracker
    page = row(serving, a)[4:5].long() // SIZE
    late = torch.tensor([[123, 456, 789, 1]])
    serving.before_compute.append(lambda: tracker.land(page, late))
    serving.step(a, b)
    serving.before_compute.clear()
    serving.finish(b)
    assert faults(serving) == {Fault.TORN}
    assert_ended(serving, "a")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_that_writes_to_anothers_page(serve, overlap):
    """The other has read what was written, in the same step: both are ended before they are sent anything of it."""
    serving, a, b = two_running(serve, overlap=overlap)
    bystander = serving.submit("c", [1, 2, 3], 6)
    serving.step(bystander)
    row(serving, a)[12:16] = row(serving, b)[4:8]
    serving.finish(a, b, bystander)
    assert_ended(serving, "a", "b")
    assert len(serving.sent["c"]) == 6


def test_the_new_holder_of_a_page_that_was_written_to_is_not_ended(serve):
    """Steps overlap: the page is released, and granted anew, before the verdict on the write is read."""
    serving, a, b = two_running(serve, overlap=True)
    page = row(serving, b)[12:13] // SIZE
    batch, _ = serving.decode(a, run=False)
    batch.out_cache_loc = page * SIZE + 1
    launched = batch, serving.scheduler.run_batch(batch)
    serving.retract(b)
    new = serving.submit("c", [1, 2, 3], 6)
    behind = serving.prefill(new)
    assert int(row(serving, new)[0] // SIZE) == int(page[0])
    serving.process(launched)
    serving.process(behind)
    serving.finish(new)
    assert ended(serving) == {"a"}
    assert serving.sent["c"] == serving.right("c", 6)


def test_a_token_beside_its_place(serve):
    """The write side, in a page of its own."""
    serving, a, b = two_running(serve)
    batch, _ = serving.decode(b, run=False)
    batch.out_cache_loc = batch.out_cache_loc + 2
    serving.process((batch, serving.scheduler.run_batch(batch)))
    serving.finish(a)
    assert faults(serving) == {Fault.WRITE_OUT_OF_PLACE, Fault.SPOILED}
    assert_ended(serving, "b")


def test_a_violation_that_is_lost_ends_the_whole_batch(serve):
    serving, a, b = two_running(serve, settings={"ring_lines": 1})
    row(serving, a)[:4] = row(serving, b)[:4]
    serving.finish(a, b)
    assert ended(serving) == {"a", "b"}
    assert serving.wrong() == []


def test_a_row_of_nobody_ends_the_whole_batch(serve):
    """Kind 4: a step reads a row that no request has, and whose tokens it makes nobody can say."""
    serving, a, b = two_running(serve)
    batch, _ = serving.decode(a, b, run=False)
    batch.req_pool_indices[0] = next(r for r in serving.rows.free_slots if r != 0)
    serving.process((batch, serving.scheduler.run_batch(batch)))
    assert_ended(serving, "a", "b")


def test_halt_ends_the_server(serve):
    serving, a, b = two_running(serve, mode=Mode.HALT)
    row(serving, a)[:4] = row(serving, b)[:4]
    with pytest.raises(KvGuardError, match="request a, physical page"):
        serving.step(a, b)
    assert len(serving.sent["a"]) == 2


def test_log_names_and_goes_on(serve, caplog):
    serving, a, b = two_running(serve, mode=Mode.LOG)
    right = row(serving, a)[:4].clone()
    row(serving, a)[:4] = row(serving, b)[:4]
    serving.step(a, b)
    row(serving, a)[:4] = right
    serving.finish(a, b)
    assert "KV guard, step 2, group 0: request a, physical page" in caplog.text
    assert serving.wrong() == ["a"]
    assert ended(serving) == set()


def test_a_name_that_is_used_again_is_not_ended_for_it(serve):
    serving, a, b = two_running(serve)
    row(serving, a)[:4] = row(serving, b)[:4]
    serving.finish(a, b)
    del serving.ended["a"]
    again = serving.submit("a", PROMPT, 3)
    serving.finish(again)
    assert "a" in serving.ended
    assert "a" not in ended(serving)
