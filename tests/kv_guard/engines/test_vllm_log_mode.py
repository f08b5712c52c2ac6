"""In mode log nothing that the guard meets ends a server: it says so once, and is off; in the others it refuses."""

import pytest

from quantkit.kv_guard.tracker import KvGuardError
from tests.kv_guard.engines.small_vllm import harness
from tests.kv_guard.engines.small_vllm import pool as core
from tests.kv_guard.engines.small_vllm.harness import Engine

OFF = "the KV guard is off from here on"


def worker(engine):
    return engine.runners[0].quantkit_kv_guard


def another_request(engine):
    engine.scheduler.quantkit_kv_guard.shadow._free_rows.clear()
    engine.add("b", range(30, 39))


SITES = {
    "a scheduler without a guard": (
        lambda engine: delattr(engine.scheduler, "quantkit_kv_guard"),
        "without the events of its scheduler",
    ),
    "a worker without a guard": (
        lambda engine: delattr(engine.runners[0], "quantkit_kv_guard"),
        "a step that it did not check",
    ),
    "events out of order": (lambda engine: setattr(worker(engine)._receiver, "_next", 7), "came, 7 was next"),
    "a request that nobody granted": (lambda engine: worker(engine)._receiver._rows.clear(), "granted it nothing"),
    "more requests than rows": (another_request, "more than 36 requests have pages"),
    "a verdict that was read": (
        lambda engine: worker(engine).trackers[0].verdict(worker(engine).trackers[0]._verdicts.step - 1),
        "its verdict was read",
    ),
    "a step too wide": (
        lambda engine: object.__setattr__(worker(engine).trackers[0].settings.size, "most_pages", 1),
        "was said",
    ),
}


def disturb(make, change):
    """Steps overlap, so that one is always in work."""
    engine = make(depth=2)
    engine.add("a", range(10), max_tokens=8)
    for _ in range(3):
        engine.step()
    change(engine)
    engine.run()
    return engine


@pytest.mark.parametrize("site", SITES)
def test_mode_log_ends_no_server(miniature, caplog, site):
    change, says = SITES[site]
    harness.environment(miniature, "log")
    engine = disturb(Engine, change)
    assert all(engine.is_right(name) for name in engine.prompts)
    assert len(engine.released["a"]) == 8
    said = [record.getMessage() for record in caplog.records if OFF in record.getMessage()]
    assert sum(says in one for one in said) == 1
    assert len(said) == len(set(said)) <= 2  # a scheduler's guard goes off behind a worker's, and the other way about


@pytest.mark.parametrize("site", SITES)
def test_mode_abort_refuses(miniature, site):
    change, says = SITES[site]
    with pytest.raises(KvGuardError, match=says):
        disturb(Engine, change)


def test_mode_log_serves_beside_a_pool_that_is_in_use(miniature, caplog):
    make_pool = core.BlockPool.__init__

    def used(pool, *arguments):
        make_pool(pool, *arguments)
        pool.free_block_queue.popleft()

    miniature.setattr(core.BlockPool, "__init__", used)
    harness.environment(miniature, "log")
    engine = disturb(Engine, lambda engine: None)
    assert engine.is_right("a")
    assert "in use already" in caplog.text


def test_mode_log_serves_with_a_pool_that_is_made_again(miniature, caplog):
    harness.environment(miniature, "log")
    engine = Engine()
    engine.runners[0].initialize_kv_cache(engine.kv_cache_config)
    engine.add("a", range(10))
    engine.run()
    assert engine.is_right("a")
    assert f"{OFF}: a guard is attached already" in caplog.text
