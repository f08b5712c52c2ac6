"""A decode server runs short of pages: a request's KV goes to the host, and comes back to other pages."""

from quantkit.kv_guard.faults import Fault
from tests.kv_guard.engines.small_sglang.places import srt
from tests.kv_guard.engines.test_sglang_transfers import PROMPT, SIZE, Decode, faults, pages_of, prefill, write

OTHERS = [200 + place for place in range(13)]


def running(serve, num_steps=2):
    """Two requests that came over and decode, and what was sent of the first."""
    sent = prefill(serve, [PROMPT, OTHERS])
    decode = Decode(serve)
    requests = []
    for room, (prompt, (parts, token)) in enumerate(zip([PROMPT, OTHERS], sent, strict=True), 1):
        req = decode.reserve(room, prompt, 8)
        write(decode.serving, pages_of(decode.serving, req), parts)
        decode.commit(req, token)
        decode.serving.sent[req.rid] = list(req.output_ids)
        requests.append(req)
    for _ in range(num_steps):
        decode.serving.step(*requests)
    return decode, requests, sent[0][0]


def retract(serving, req):
    """As `release_req` does it."""
    backup = srt("managers.schedule_batch").backup_kv_cache
    assert backup(req, serving.tree, serving.rows, serving.allocator, "cpu_tensor")
    serving.retract(req)


def resume(decode, req):
    """As `resume_retracted_reqs` does it."""
    req.is_retracted = False
    decode.prealloc._pre_alloc(req)
    restore = srt("disaggregation.decode").restore_kv_cache
    serving = decode.serving
    restore(req, serving.tree, serving.rows, serving.allocator, "cpu_tensor")


def test_a_request_that_comes_back(serve):
    decode, (req, other), _ = running(serve)
    serving = decode.serving
    before = pages_of(serving, req)
    retract(serving, req)
    local = serving.submit("local", [*range(1, 10)], 6)
    serving.step(local)
    resume(decode, req)
    assert pages_of(serving, req) != before
    serving.finish(req, other, local)
    assert (faults(serving), serving.wrong(), serving.num_lost()) == (set(), [], 0)
    assert len(serving.sent["d1"]) == 8


def test_what_came_to_its_new_pages_before_concerns_it_not(serve):
    """They were free, and a transfer to who had them landed."""
    decode, (req, other), sent = running(serve)
    serving = decode.serving
    retract(serving, req)
    write(serving, serving.allocator.free_pages[:4].tolist(), sent)
    resume(decode, req)
    serving.finish(req, other)
    assert (faults(serving), serving.wrong()) == (set(), [])


def assert_ended(serving, rid):
    assert isinstance(serving.ended[rid], srt("managers.schedule_batch").FINISH_ABORT)
    assert (serving.wrong(), serving.num_lost()) == ([], 0)
    assert not serving.guard.condemned


def test_anothers_page_that_goes_to_the_host(serve):
    """No step reads it, and what comes back lies in pages of the request's own."""
    decode, (req, other), _ = running(serve)
    serving = decode.serving
    row = serving.rows.req_to_token
    row[req.kv.req_pool_idx, :SIZE] = row[other.kv.req_pool_idx, :SIZE]
    retract(serving, req)
    serving.step(other)
    resume(decode, req)
    serving.finish(req, other)
    assert Fault.OTHER_OWNER in faults(serving)
    assert len(serving.sent["d1"]) == 3
    assert len(serving.sent["d2"]) == 8
    assert_ended(serving, "d1")


def test_a_late_write_to_a_page_that_goes_to_the_host(serve):
    decode, (req, other), sent = running(serve)
    serving = decode.serving
    write(serving, pages_of(serving, req)[1:2], [parts[:1] for parts in sent])
    retract(serving, req)
    resume(decode, req)
    serving.finish(req, other)
    assert len(serving.sent["d1"]) == 3
    assert_ended(serving, "d1")
