"""Prefill on one server, decode on another: tags travel beside the pages, by the pointers that SGLang is given."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from quantkit.kv_guard.faults import Fault
from quantkit.kv_guard.tracker import KvGuardError
from tests.kv_guard.engines.small_sglang.places import srt

PROMPT = list(range(10, 23))  # three pages, and a token
SIZE = 4
PREFILL_RANKS = 2


def pages_of(serving, req, first=0):
    slots = serving.rows.req_to_token[req.kv.req_pool_idx, first * SIZE : req.kv.kv_allocated_len : SIZE]
    return (slots // SIZE).tolist()


def read(serving, pages):
    """What a transfer takes: of each buffer, the bytes of pages."""
    pointers, _, lengths = serving.kv_pool.get_contiguous_buf_infos()
    return [
        [ctypes.string_at(pointer + page * length, length) for page in pages]
        for pointer, length in zip(pointers, lengths, strict=True)
    ]


def write(serving, pages, sent):
    """What a transfer does, whenever it likes."""
    pointers, _, lengths = serving.kv_pool.get_contiguous_buf_infos()
    for pointer, length, parts in zip(pointers, lengths, sent, strict=True):
        for page, part in zip(pages, parts, strict=True):
            ctypes.memmove(pointer + page * length, part, length)


def prefill(serve, prompts=(PROMPT,), **options):
    """A server that computes prompts, in rooms from 1 on; returns what it sends, and each first token."""
    serving = serve(disaggregation_mode="prefill", num_pages=40, **options)
    sent = []
    for room, prompt in enumerate(prompts, 1):
        req = serving.submit(f"p{room}", prompt, 2, bootstrap_room=room, bootstrap_host="p")
        serving.step(req)
        sent.append((read(serving, pages_of(serving, req)), serving.sent[f"p{room}"][0]))
    serve.stop()
    return sent


class Decode:
    """A server that decodes, with its queues."""

    def __init__(self, serve, **options):
        self.serving = serve(disaggregation_mode="decode", num_pages=40, **options)
        self.prealloc, self.transfers = self.serving.make_queues()
        kind = srt("disaggregation.common.conn").CommonKVManager
        self.manager = kind.__new__(kind)
        self.manager._deferred_abort_ack_tracker, self.manager._deferred_abort_generation = {}, 0

    def reserve(self, room, prompt=PROMPT, max_new=5, prefix=0):
        req = self.serving.submit(f"d{room}", prompt, max_new, bootstrap_room=room, bootstrap_host="p")
        if prefix:
            srt("mem_cache.common").match_kv_cache(req, self.serving.tree, req.origin_input_ids, max_prefix_len=prefix)
            assert req.prefix_len == prefix
        slots = self.serving.tree.path_device_indices(req.last_node) if prefix else None
        self.prealloc._pre_alloc(req, slots, prefix, prefix)
        req.lock = self.serving.tree.lock(req.last_node) if prefix else None
        req.kv.cache_protected_len = prefix
        return req

    def commit(self, req, token):
        self.serving.commit(self.transfers, req, token)

    def fail(self, req, *, acks=PREFILL_RANKS, was_told=True):
        """Of the other server ``acks`` ranks say that they write no more, until the pages are given back."""
        receiver = SimpleNamespace(
            kv_mgr=self.manager,
            bootstrap_infos=[{}] * PREFILL_RANKS if was_told else None,
            clear=lambda: None,
        )
        generation = self.manager.register_deferred_abort_room(req.bootstrap_room)
        for rank in range(acks):
            self.manager.note_abort_ack(req.bootstrap_room, rank, generation)
        self.transfers._do_release(SimpleNamespace(req=req, kv_receiver=receiver), 0)

    def admit(self, req):
        """As a prebuilt batch: the cache may take the prompt."""
        self.serving.checkpoint(req)
        self.serving.sent[req.rid] = list(req.output_ids)


def faults(serving):
    return {fault for fault, count in serving.guard.pool.tracker.metrics.violations.items() if count}


def test_a_request_goes_over(serve):
    """It lands before the guard has told its tracker of the pages."""
    ((sent, token),) = prefill(serve)
    decode = Decode(serve)
    req = decode.reserve(1)
    write(decode.serving, pages_of(decode.serving, req), sent)
    decode.commit(req, token)
    decode.admit(req)
    decode.serving.finish(req)
    assert decode.serving.sent["d1"] == decode.serving.right("d1", 5)
    assert (faults(decode.serving), decode.serving.wrong(), decode.serving.num_lost()) == (set(), [], 0)


def test_it_lands_while_others_run(serve):
    ((sent, token),) = prefill(serve)
    decode = Decode(serve)
    first = decode.reserve(1, max_new=9)
    write(decode.serving, pages_of(decode.serving, first), sent)
    decode.commit(first, token)
    decode.admit(first)
    second = decode.reserve(1)
    decode.serving.step(first)
    write(decode.serving, pages_of(decode.serving, second), sent)
    decode.serving.step(first)
    decode.commit(second, token)
    decode.admit(second)
    decode.serving.finish(first, second)
    assert (faults(decode.serving), decode.serving.wrong()) == (set(), [])


def test_a_prefix_that_the_decode_server_has(serve):
    """Only the rest is sent."""
    longer = [*PROMPT[:12], 90, 91, 92, 93, 94]
    (whole, token), (other, last) = prefill(serve, [PROMPT, longer])
    decode = Decode(serve)
    first = decode.reserve(1)
    write(decode.serving, pages_of(decode.serving, first), whole)
    decode.commit(first, token)
    decode.admit(first)
    second = decode.reserve(2, longer, prefix=12)
    write(decode.serving, pages_of(decode.serving, second, 3), [parts[3:] for parts in other])
    decode.commit(second, last)
    decode.admit(second)
    decode.serving.finish(first, second)
    assert (faults(decode.serving), decode.serving.wrong()) == (set(), [])


def test_a_transfer_that_has_not_landed(serve):
    ((_, token),) = prefill(serve)
    decode = Decode(serve)
    req = decode.reserve(1)
    decode.commit(req, token)
    decode.admit(req)
    decode.serving.finish(req)
    assert Fault.NOT_ARRIVED in faults(decode.serving)
    assert decode.serving.sent["d1"] == [token]  # which the other server made


@pytest.mark.parametrize("pages", [[1, 0, 2, 3], [0, 1, 2]])
def test_pages_that_land_elsewhere(serve, pages):
    """Two of them exchanged; the last one missing."""
    ((sent, token),) = prefill(serve)
    decode = Decode(serve)
    req = decode.reserve(1)
    places = pages_of(decode.serving, req)
    write(decode.serving, places[: len(pages)], [[parts[page] for page in pages] for parts in sent])
    decode.commit(req, token)
    decode.admit(req)
    decode.serving.finish(req)
    assert isinstance(decode.serving.ended["d1"], srt("managers.schedule_batch").FINISH_ABORT)
    assert decode.serving.wrong() == []


def test_anothers_pages_land(serve):
    """Kind 1 at its plainest: what comes is right in itself, and belongs to another request."""
    (_, token), (other, _) = prefill(serve, [PROMPT, [200 + place for place in range(13)]])
    decode = Decode(serve)
    req = decode.reserve(1)
    write(decode.serving, pages_of(decode.serving, req), other)
    decode.commit(req, token)
    decode.admit(req)
    decode.serving.finish(req)
    assert Fault.OTHER_OWNER in faults(decode.serving)
    assert decode.serving.sent["d1"] == [token]


def test_a_late_write_to_pages_that_were_granted_anew(serve):
    """Kind 1: an aborted request's pages are freed, granted to another that runs, and then its transfer lands.

    Though the other server had said that it writes no more.
    """
    others = [200 + place for place in range(13)]
    (sent, _), (other, token) = prefill(serve, [PROMPT, others])
    decode = Decode(serve)
    serving = decode.serving
    aborted = decode.reserve(1)
    stale = pages_of(serving, aborted)
    decode.fail(aborted)
    req = decode.reserve(2, others)
    assert set(pages_of(serving, req)) == set(stale)
    write(serving, pages_of(serving, req), other)
    decode.commit(req, token)
    decode.admit(req)
    serving.step(req)
    serving.before_compute.append(lambda: write(serving, stale, sent))
    serving.step(req)
    assert len(serving.sent["d2"]) == 2
    assert isinstance(serving.ended["d2"], srt("managers.schedule_batch").FINISH_ABORT)
    assert (serving.wrong(), serving.num_lost()) == ([], 0)


def test_a_write_to_free_pages_concerns_nobody(serve):
    ((sent, _),) = prefill(serve)
    decode = Decode(serve)
    serving = decode.serving
    gone = decode.reserve(1)
    stale = pages_of(serving, gone)
    decode.fail(gone)
    write(serving, stale, sent)
    local = serving.submit("local", [*range(1, 10)], 6)
    serving.step(local)
    assert set(pages_of(serving, local)) <= set(stale)
    serving.finish(local)
    assert (faults(serving), serving.wrong()) == (set(), [])


def test_buffers_are_of_the_model_alone(serve):
    serving = serve(disaggregation_mode="prefill")
    pointers, _, lengths = serving.kv_pool.get_contiguous_buf_infos()
    assert (len(pointers), lengths[1:]) == (3, [8, 24])
    draft = type(serving.kv_pool).__new__(type(serving.kv_pool))
    draft.kv_buffer, draft.page_size, draft.layer_num = [torch.zeros(8, 1)], SIZE, 1
    assert len(draft.get_contiguous_buf_infos()[0]) == 1


def test_a_decode_server_without_the_guard(serve):
    """SGLang pairs buffers by their order: tags would go where a draft model's pages are."""
    serving = serve(disaggregation_mode="prefill")
    manager = srt("disaggregation.common.conn").CommonKVManager
    manager = manager.__new__(manager)
    manager.kv_args = SimpleNamespace(prefill_start_layer=0)
    ours, _, _ = serving.kv_pool.get_contiguous_buf_infos()
    assert manager.get_mla_kv_ptrs_with_pp(ours, [1, 2, 3])[1:] == ([1, 2, 3], 3)
    assert manager.get_mla_kv_ptrs_with_pp([7], [8, 9], "state")[2] == 1
    with pytest.raises(KvGuardError, match="3 buffers, two of them tags, to a server that has 1; run the guard on"):
        manager.get_mla_kv_ptrs_with_pp(ours, [1])


def test_no_buffers_without_a_transfer(serve):
    assert len(serve().kv_pool.get_contiguous_buf_infos()[0]) == 1


def test_a_pool_that_changes_under_a_transfer(serve):
    serving = serve(disaggregation_mode="prefill")
    serving.kv_pool.get_contiguous_buf_infos()
    with pytest.raises(KvGuardError, match="changed under a transfer"):
        serving.allocator.resize(SimpleNamespace(max_total_num_tokens=80))


@pytest.mark.parametrize(
    "option",
    [{"disaggregation_enable_kv_checksum": True}, {"disaggregation_transfer_backend": "mori"}, {"enable_lora": True}],
)
def test_transfers_that_are_not_covered(serve, option):
    (name,) = option
    with pytest.raises(KvGuardError, match=f"--{name.replace('_', '-')} is .*, and the guard covers"):
        serve(disaggregation_mode="decode", **option)
