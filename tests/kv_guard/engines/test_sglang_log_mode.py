"""In mode log nothing that the guard meets ends a server: it says so once, and is off; in the others it refuses."""

import logging

import pytest

from quantkit.kv_guard.engines.sglang import plugin
from quantkit.kv_guard.engines.sglang.condemned import Condemned
from quantkit.kv_guard.tracker import KvGuardError, Mode
from tests.kv_guard.engines.small_sglang.places import srt

PROMPT = list(range(10, 23))
OFF = "the KV guard is off from here on"


def hooks(name):
    """The object whose methods are hooks of a function."""
    registry = srt("plugins.hook_registry").HookRegistry
    return next(hook.__self__ for path, ((_, hook, _),) in registry._hooks.items() if path.endswith(name))


def hand_out_unseen(serving):
    paged = type(serving.allocator)
    serving.allocator.alloc_decode = paged.alloc_decode.__wrapped__.__get__(serving.allocator)


def insert_unseen(serving):
    tree = serving.tree
    hooks("UnifiedRadixCache.insert").insert(None, tree, None)


def read_verdict(serving):
    """By the time that the engine asks."""
    tracker = serving.guard.pool.tracker
    tracker.after_step, after = lambda: (after(), tracker.verdict(tracker._verdicts.step - 1)), tracker.after_step


SITES = {
    "slots of a path that is not known": (lambda serving: serving.allocator.alloc(4), "handed out by a path"),
    "slots that no hook saw": (hand_out_unseen, "0 allocations where one was expected"),
    "an allocation within another": (
        lambda serving: setattr(hooks("alloc_for_decode"), "_handed", []),
        "an allocation began within another",
    ),
    "a checkpoint within another": (
        lambda serving: setattr(hooks("checkpoint_into_tree"), "_insertions", []),
        "a checkpoint began within another",
    ),
    "an insertion of a path that is not known": (insert_unseen, "entered the cache by a path"),
    "more cached pages than there are": (
        lambda serving: serving.guard.pool.kept._free.clear(),
        "more pages than the pool has",
    ),
    "a verdict that was read": (read_verdict, "its verdict was read"),
    "a step too wide": (
        lambda serving: object.__setattr__(serving.guard.pool.tracker.settings.size, "most_pages", 1),
        "was said",
    ),
}


def disturb(serve, mode, change):
    serving = serve(mode=mode)
    req = serving.submit("a", PROMPT, 8)
    serving.step(req)
    change(serving)
    serving.finish(req)
    return serving


@pytest.mark.parametrize("site", SITES)
def test_mode_log_ends_no_server(serve, caplog, site):
    change, says = SITES[site]
    serving = disturb(serve, Mode.LOG, change)
    assert serving.sent["a"] == serving.right("a", 8)
    again = serving.submit("b", PROMPT[:9], 3)
    serving.finish(again)
    assert serving.sent["b"] == serving.right("b", 3)
    said = [record.getMessage() for record in caplog.records if OFF in record.getMessage()]
    assert len(said) == 1
    assert says in said[0]


@pytest.mark.parametrize("site", SITES)
def test_mode_abort_refuses(serve, site):
    change, says = SITES[site]
    with pytest.raises(KvGuardError, match=says):
        disturb(serve, Mode.ABORT, change)


def test_requests_are_ended_alone_in_mode_abort_only():
    log, abort = Condemned(Mode.LOG), Condemned(Mode.ABORT)
    for condemned in (log, abort):
        condemned.add(["a", "b"])
        condemned.let_go("b")
        condemned.let_go("c")
    assert [("a" in one, "b" in one, len(one)) for one in (log, abort)] == [(False, False, 0), (True, False, 1)]


@pytest.mark.parametrize("mode", [Mode.LOG, Mode.ABORT])
def test_an_engine_that_is_not_as_it_was_read(engine, monkeypatch, caplog, mode):
    """SGLang goes on without a plugin that raises, and does not go on without a process."""
    monkeypatch.delattr(srt("managers.scheduler").Scheduler, "run_batch")
    monkeypatch.setenv("QUANTKIT_KV_GUARD", mode)
    if mode is Mode.ABORT:
        with pytest.raises(SystemExit, match=r"run_batch \(.*\) is not there"):
            plugin.load()
        return
    caplog.set_level(logging.ERROR)
    plugin.load()
    assert OFF in caplog.text
