"""A transfer that never comes to be read: its pages are nobody's until SGLang knows that nothing is on its way."""

from types import SimpleNamespace

import pytest

from quantkit.kv_guard.faults import Fault
from quantkit.kv_guard.tracker import KvGuardError, Mode
from tests.kv_guard.engines.small_sglang.places import srt
from tests.kv_guard.engines.test_sglang_transfers import PROMPT, Decode, faults, pages_of, prefill, read, write

WARM_UP = "2.2.2.2"
OTHERS = [200 + place for place in range(13)]


class Failing(Decode):
    """A decode server, one of whose transfers fails."""

    def local(self, rid, prompt=OTHERS, max_new=4):
        """A request without a transfer, which has its pages now."""
        req = self.serving.submit(rid, prompt, max_new)
        self.serving.step(req)
        return req

    def assert_ended(self, *rids):
        aborted = srt("managers.schedule_batch").FINISH_ABORT
        ended = {rid for rid, reason in self.serving.ended.items() if isinstance(reason, aborted)}
        assert ended == set(rids)
        assert (self.serving.wrong(), self.serving.num_lost()) == ([], 0)


def write_some(serving, pages, sent, buffers):
    """A part of what a transfer brings: of these buffers, of which the first is the model's."""
    there = read(serving, pages)
    write(serving, pages, [sent[i] if i in buffers else there[i] for i in range(len(sent))])


def test_each_server_has_said_that_it_writes_no_more(serve):
    """Aborted by its user, or failed, or timed out: SGLang keeps the pages until then."""
    decode = Failing(serve)
    gone = decode.reserve(1)
    stale = pages_of(decode.serving, gone)
    decode.fail(gone)
    local = decode.local("local")
    assert set(pages_of(decode.serving, local)) & set(stale)
    decode.serving.finish(local)
    assert faults(decode.serving) == set()
    decode.assert_ended()


def test_no_server_was_told_of_the_pages(serve):
    decode = Failing(serve)
    decode.fail(decode.reserve(1), acks=0, was_told=False)
    decode.serving.finish(decode.local("local"))
    assert faults(decode.serving) == set()
    decode.assert_ended()


@pytest.mark.parametrize("acks", [0, 1])
def test_a_server_that_says_nothing(serve, acks, caplog):
    """SGLang gives the pages back after 30 seconds all the same: who has them next is ended, and nobody after him."""
    decode = Failing(serve)
    other = decode.local("other", [*range(300, 306)], 9)
    gone = decode.reserve(1)
    stale = pages_of(decode.serving, gone)
    decode.fail(gone, acks=acks)
    assert "d1 are given back while its transfer may still write there" in caplog.text
    decode.serving.step(other)
    for rid in ("next", "after"):
        req = decode.local(rid)
        assert set(pages_of(decode.serving, req) if req.kv.holds_kv else stale) & set(stale)
        decode.serving.finish(req)
    decode.serving.finish(other)
    assert faults(decode.serving) == {Fault.LANDING, Fault.SPOILED}
    decode.assert_ended("next")


def test_the_next_holder_awaits_a_transfer_too(serve):
    ((sent, token),) = prefill(serve, [OTHERS])
    decode = Failing(serve)
    decode.fail(decode.reserve(7), acks=0)
    req = decode.reserve(1, OTHERS)
    write(decode.serving, pages_of(decode.serving, req), sent)
    decode.commit(req, token)
    decode.admit(req)
    decode.serving.finish(req)
    assert Fault.LANDING in faults(decode.serving)
    decode.assert_ended("d1")


def test_content_that_lands_behind_the_release_though_its_tag_had_landed(serve):
    """Of buffers that are sent together none is known to land first: no tag says that content is yet to come."""
    ((sent, _),) = prefill(serve)
    decode = Failing(serve)
    serving = decode.serving
    gone = decode.reserve(1)
    stale = pages_of(serving, gone)
    write_some(serving, stale, sent, buffers=[1, 2])
    decode.fail(gone, acks=0)
    req = serving.submit("next", OTHERS, 4)
    serving.before_compute.append(lambda: write_some(serving, stale, sent, buffers=[0]))
    serving.step(req)
    assert serving.sent["next"] == []
    decode.assert_ended("next")


def test_halt_ends_a_server_whose_pages_are_given_back_too_soon(serve):
    decode = Failing(serve, mode=Mode.HALT)
    decode.fail(decode.reserve(1), acks=0)
    with pytest.raises(KvGuardError, match="may still write"):
        decode.local("local")


def test_what_came_beside_the_pages_was_anothers(serve):
    """The transfer was complete: nothing is on its way, and nobody reads what came."""
    ((sent, token),) = prefill(serve)
    decode = Failing(serve)
    req = decode.reserve(1)
    write(decode.serving, pages_of(decode.serving, req), sent)
    given_up = decode.serving.commit(decode.transfers, req, token, room=99)
    assert req.finished()
    decode.transfers._release_request(given_up)
    decode.serving.finish(decode.local("local"))
    assert faults(decode.serving) == set()
    decode.assert_ended()


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_warm_up(serve, is_given_up):
    """Nothing is sent, and a model answers something."""
    decode = Failing(serve)
    req = decode.serving.submit("warm", PROMPT, 3, bootstrap_room=1, bootstrap_host=WARM_UP)
    decode.prealloc._pre_alloc(req, None, 0, 0)
    req.lock, req.kv.cache_protected_len = None, 0
    if is_given_up:
        receiver = SimpleNamespace(kv_mgr=decode.manager, clear=lambda: None)
        decode.transfers._release_request(SimpleNamespace(req=req, kv_receiver=receiver))
    else:
        decode.commit(req, 5)
        decode.admit(req)
        decode.serving.finish(req)
    decode.serving.finish(decode.local("local"))
    assert faults(decode.serving) == set()


def test_a_step_reads_what_has_not_come(serve):
    """A request that runs ahead of its transfer, which nobody has said to be complete."""
    ((_, token),) = prefill(serve)
    decode = Failing(serve)
    req = decode.reserve(1)
    req.output_ids.append(token)
    decode.serving.step(req)
    assert Fault.NOT_ARRIVED in faults(decode.serving)
    assert len(req.output_ids) == 1
    decode.assert_ended("d1")


@pytest.mark.parametrize(("max_new", "is_written"), [(4, False), (2, True)])
def test_what_lands_while_the_last_step_of_a_request_that_has_ended_runs(serve, max_new, is_written):
    """Steps overlap: its pages are another's by then, who is ended where that step stored a token in one of them."""
    (first_sent, first_token), (sent, token) = prefill(serve, [PROMPT, OTHERS])
    decode = Failing(serve, overlap=True, disable_radix_cache=True)
    serving = decode.serving
    first = decode.reserve(1, max_new=max_new)
    write(serving, pages_of(serving, first), first_sent)
    decode.commit(first, first_token)
    decode.admit(first)
    launched = serving.decode(first)
    for _ in range(max_new - 2):
        behind = serving.decode(first, behind=launched)
        serving.process(launched)
        launched = behind

    def meanwhile():  # the host runs ahead of the device
        serving.process(launched)
        assert first.finished()
        write(serving, pages_of(serving, decode.reserve(2, OTHERS)), sent)

    serving.before_compute.append(meanwhile)
    behind = serving.decode(first, behind=launched)
    serving.before_compute.clear()
    second = serving.reqs["d2"]
    decode.commit(second, token)
    decode.admit(second)
    serving.process(behind)
    serving.finish(second)
    decode.assert_ended(*(["d2"] if is_written else []))
    assert bool(faults(serving)) == is_written


def test_what_a_transfer_that_was_given_up_has_left_is_no_arrival_for_the_same_prompt(serve):
    """Pages go from a prompt to another one, whose content comes without its tags, and back to the first prompt, for
    which nothing comes. The tags of the first transfer would pass."""
    prompts = list(range(10, 22)), list(range(200, 212))  # of whole pages
    (first, token), (second, _) = prefill(serve, prompts)
    decode = Failing(serve)
    local = decode.local("local", [1, 2, 3], 20)
    for room, prompt, sent, buffers in ((1, prompts[0], first, {0, 1, 2}), (2, prompts[1], second, {0})):
        gone = decode.reserve(room, prompt)
        pages = pages_of(decode.serving, gone)
        decode.serving.step(local)
        write_some(decode.serving, pages, sent, buffers)
        if room == 1:
            decode.serving.step(local)
        decode.fail(gone)
        decode.serving.step(local)
    req = decode.reserve(3, prompts[0])
    assert pages_of(decode.serving, req) == pages
    decode.serving.step(local)
    decode.commit(req, token)
    decode.admit(req)
    decode.serving.sent[req.rid] = list(req.output_ids)
    decode.serving.finish(req, local, most=60)
    assert faults(decode.serving) == {Fault.NOT_ARRIVED}
    assert decode.serving.wrong() == []
