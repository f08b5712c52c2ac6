"""What the scheduler's side makes of a pool's events, and that a tracker grants under generations drawn elsewhere."""

import pickle
from dataclasses import replace

import pytest
import torch

from quantkit.kv_guard.engines.vllm.events import BadGrant
from quantkit.kv_guard.engines.vllm.shadow import Shadow
from quantkit.kv_guard.identity import Chains, PoolIdentity, owner_of
from quantkit.kv_guard.page_tags import PageTagTracker
from quantkit.kv_guard.settings import GuardSettings, PoolSize
from quantkit.kv_guard.tracker import KvGuardError

IDENTITY = PoolIdentity(model="tiny", layout="pages of 4")


def shadow_of(num_rows=4):
    return Shadow(chains=[Chains(IDENTITY.key(b""))], num_rows=num_rows, marks_cached=True)


def begin(shadow, request, pages, hashes=()):
    shadow.hand_out(page for page in pages if page is not None)
    shadow.extend(request, 0, pages, lambda index: hashes[index] if index < len(hashes) else None)


def columns(events, kind):
    return [column.tolist() for column in getattr(events.groups[0], kind)]


def test_a_tracker_grants_under_generations_of_another_process():
    size = PoolSize(num_pages=8, page_size=4, num_rows=2, most_pages=4)
    tracker = PageTagTracker(GuardSettings(identity=IDENTITY, size=size))
    pages = torch.tensor([3, 5])
    tracker.grant(pages, torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([11, 12]), (1 << 64) - 1)
    assert tracker.tags.records_P3[pages, 0].tolist() == [-1, 1]
    tracker.grant(torch.tensor([6]), torch.tensor([1]), torch.tensor([0]), torch.tensor([13]))
    assert tracker.tags.records_P3[6, 0] not in {-1, 0, 1}


def test_an_engines_hash_is_keyed_and_no_other_digest():
    chains, other = Chains(IDENTITY.key(b"")), Chains(PoolIdentity(model="else", layout="pages of 4").key(b""))
    digests = {chains.of_hash(b"h" * 32), other.of_hash(b"h" * 32), chains.start(b"h" * 32), chains.of_hash(b"h")}
    assert len(digests) == 4


def test_what_was_granted_and_given_back_between_two_steps_is_told_to_nobody():
    shadow = shadow_of()
    begin(shadow, "a", [1, 2])
    shadow.leave("a")
    for page in (1, 2):
        shadow.give_up(page, is_cached=False)
    events = shadow.take([])
    assert (events.opened, events.closed, columns(events, "released"), columns(events, "granted")) == (
        [],
        [],
        [[]],
        [[]] * 4,
    )


def test_a_request_that_waits_for_its_first_step_has_no_row_yet():
    """As one whose KV is still being loaded; there may be any number."""
    shadow = shadow_of(num_rows=1)
    begin(shadow, "loads", [1])
    begin(shadow, "runs", [2])
    assert shadow.take(["runs"]).opened == [(0, "runs")]
    shadow.leave("runs")
    events = shadow.take(["loads"])
    assert (events.closed, events.opened, columns(events, "granted")[0]) == ([0], [(0, "loads")], [1])


def test_more_requests_than_rows_are_refused():
    shadow = shadow_of(num_rows=1)
    begin(shadow, "a", [1])
    begin(shadow, "b", [2])
    with pytest.raises(KvGuardError, match="max-num-seqs"):
        shadow.take(["a", "b"])


def test_a_cached_page_is_released_when_it_is_handed_out_anew():
    shadow, hashes = shadow_of(), [b"first"]
    begin(shadow, "a", [1], hashes)
    shadow.take(["a"])
    shadow.cache("a", 0, 0, 1, b"first")
    shadow.leave("a")
    shadow.give_up(1, is_cached=True)
    assert columns(shadow.take([]), "released") == [[]]
    shadow.take_up(1)
    shadow.extend("b", 0, [1], lambda index: hashes[index])
    shared = columns(shadow.take(["b"]), "shared")
    assert shared[3] == [owner_of(shadow.chains[0].of_hash(b"first"))]
    assert shared[2] != [0]
    shadow.leave("b")
    shadow.give_up(1, is_cached=True)
    begin(shadow, "c", [1])
    events = shadow.take(["c"])
    assert (columns(events, "released"), columns(events, "granted")[0]) == ([[1]], [1])


def test_a_page_of_another_hash_is_expected_under_a_generation_that_there_is_not():
    shadow = shadow_of()
    begin(shadow, "a", [1], [b"first"])
    shadow.take(["a"])
    shadow.cache("a", 0, 0, 1, b"first")
    shadow.extend("b", 0, [1], lambda index: b"other")
    assert columns(shadow.take(["b"]), "shared")[2] == [0]


def test_a_bad_page_is_what_it_was_granted_as_until_it_is_given_up():
    """A report may be read behind that; a generation of 0 is that of a grant of which nobody was told."""
    shadow = shadow_of()
    begin(shadow, "a", [1, 2])
    assert shadow.granted_as(BadGrant(group=0, page=1, generation=0)) is None
    events = shadow.take(["a"])
    bad = BadGrant(group=0, page=1, generation=events.groups[0].first_generation)
    assert shadow.granted_as(bad) is shadow.holdings["a"].groups[0][0]
    for other in (replace(bad, group=1), replace(bad, page=2), replace(bad, page=99)):
        assert shadow.granted_as(other) is None
    shadow.leave("a")
    shadow.give_up(1, is_cached=False)
    assert shadow.granted_as(bad) is None
    begin(shadow, "b", [1])
    shadow.take(["b"])
    assert shadow.granted_as(bad) is None


def test_events_are_plain_and_pickled():
    shadow = shadow_of()
    begin(shadow, "a", [1, None, 2])
    events = pickle.loads(pickle.dumps(shadow.take(["a"])))  # noqa: S301
    assert (columns(events, "granted")[0], columns(events, "granted")[2]) == ([1, 2], [0, 2])
    assert events.groups[0].first_generation > 0
