"""What the plugin refuses, and how: by name, before a request is served, and never in silence."""

import multiprocessing
import sys
from types import SimpleNamespace

import pytest
import torch

from quantkit.kv_guard.engines.settings import PluginSettings
from quantkit.kv_guard.engines.sglang.aborts import agreed
from quantkit.kv_guard.engines.sglang.guard import Guard
from quantkit.kv_guard.engines.sglang.plugin import _hooks_of, register
from quantkit.kv_guard.engines.sglang.supported import OPTIONS
from quantkit.kv_guard.engines.sglang.targets import SUPPORTED, TARGETS, Kind
from quantkit.kv_guard.engines.targets import check_version
from quantkit.kv_guard.tracker import KvGuardError, Mode
from tests.kv_guard.engines.serving_loop import Serving
from tests.kv_guard.engines.small_sglang.places import srt

PROMPT = list(range(10, 23))


def test_a_target_that_is_missing(engine, serve, monkeypatch):
    monkeypatch.delattr(srt("mem_cache.allocator.paged").PagedTokenToKVPoolAllocator, "_release_page_ids")
    with pytest.raises(
        KvGuardError, match=r"PagedTokenToKVPoolAllocator\._release_page_ids \(.*\) is not there.*SGLang 0\.5\.23"
    ):
        serve()


def test_a_module_that_is_missing(engine, serve, monkeypatch):
    monkeypatch.delitem(sys.modules, "sglang.srt.beam_search.coordinator")
    monkeypatch.delattr(sys.modules["sglang.srt.beam_search"], "coordinator")
    with pytest.raises(KvGuardError, match=r"BeamCoordinator\.validate_and_init \(.*\) is not there"):
        serve()


def test_a_target_with_other_parameters(engine, serve, monkeypatch):
    def release(self, page_ids, *, later=False):
        raise AssertionError

    monkeypatch.setattr(srt("mem_cache.allocator.paged").PagedTokenToKVPoolAllocator, "_release_page_ids", release)
    with pytest.raises(KvGuardError, match=r"takes \(self, page_ids, \*, later=\), not \(self, \*page_ids\)"):
        serve()


def test_no_hook_is_registered_where_one_is_missing(engine, serve, monkeypatch):
    monkeypatch.delattr(srt("managers.scheduler").Scheduler, "run_batch")
    with pytest.raises(KvGuardError):
        serve()
    assert not srt("plugins.hook_registry").HookRegistry._hooks


def test_a_target_names_the_file_of_its_hook():
    hook_of = _hooks_of(Guard(PluginSettings(mode=Mode.ABORT), {}))
    names = {target.hook for target in TARGETS if target.kind is not Kind.CALLED}
    assert {f"{hook_of(name).__module__.rpartition('.')[2]}.{hook_of(name).__name__}" for name in names} == names


@pytest.mark.parametrize(("version", "is_known"), [("0.5.23", True), ("0.5.23.post1", True), ("0.5.24", False)])
def test_versions(version, is_known):
    if is_known:
        check_version(version, SUPPORTED)
    else:
        with pytest.raises(KvGuardError, match=r"SGLang 0\.5\.24 is not supported; run SGLang 0\.5\.23"):
            check_version(version, SUPPORTED)


def fail_to_apply(monkeypatch, *names):
    """The registry logs and swallows what goes wrong with a target."""
    registry = srt("plugins.hook_registry").HookRegistry
    apply = registry._apply_target.__func__

    def fail(cls, target, hooks):
        if target.endswith(names):
            raise RuntimeError("somebody else patched it")
        apply(cls, target, hooks)

    monkeypatch.setattr(registry, "_apply_target", classmethod(fail))


@pytest.mark.parametrize("name", [target.name for target in TARGETS if target.kind is not Kind.CALLED])
def test_a_hook_that_was_not_applied(engine, serve, monkeypatch, name):
    """None is missed in silence, those included by which the guard itself begins."""
    fail_to_apply(monkeypatch, name)
    unseen = "the pools were made unseen" if name.endswith("_init_post_memory_pool_components") else "was not hooked"
    with pytest.raises(KvGuardError, match=unseen):
        serve()


def test_pools_and_cache_that_were_made_unseen(engine, serve, monkeypatch, caplog):
    fail_to_apply(monkeypatch, "_init_post_memory_pool_components", "build_kv_cache")
    serving = serve()
    with pytest.raises(KvGuardError, match="the pools were made unseen; see in SGLang's log"):
        serving.step(serving.submit("a", PROMPT))
    assert serving.sent["a"] == []


def test_a_guard_that_logs_says_that_it_sees_no_pools(engine, serve, monkeypatch, caplog):
    fail_to_apply(monkeypatch, "_init_post_memory_pool_components")
    serving = serve(mode=Mode.LOG)
    serving.finish(serving.submit("a", PROMPT))
    assert serving.wrong() == []
    assert "the pools were made unseen" in caplog.text


def test_a_function_that_a_module_still_calls_unhooked(engine, serve):
    original = srt("mem_cache.allocation").alloc_for_decode
    serving = serve()
    srt("managers.schedule_batch").alloc_for_decode = original
    with pytest.raises(KvGuardError, match=r"not hooked where sglang\.srt\.managers\.schedule_batch imported it"):
        serving.step(serving.submit("a", PROMPT))


def test_a_guard_that_logs_goes_off_with_a_word(engine, serve, caplog):
    original = srt("mem_cache.allocation").alloc_for_decode
    serving = serve(mode=Mode.LOG)
    srt("managers.schedule_batch").alloc_for_decode = original
    serving.finish(serving.submit("a", PROMPT))
    assert "the KV guard is off from here on" in caplog.text
    assert serving.wrong() == []


def test_an_allocator_of_another_class(engine, serve, monkeypatch):
    paged = srt("mem_cache.allocator.paged").PagedTokenToKVPoolAllocator
    subclass = type("NPUPagedTokenToKVPoolAllocator", (paged,), {})
    monkeypatch.setattr(srt("mem_cache.allocator.paged"), "PagedTokenToKVPoolAllocator", subclass)
    with pytest.raises(KvGuardError, match=r"the allocator .*NPUPagedTokenToKVPoolAllocator is not known"):
        serve()


def test_a_prefix_cache_of_another_class(engine, serve, monkeypatch):
    tree = srt("mem_cache.unified_radix_cache").UnifiedRadixCache
    monkeypatch.setattr(srt("mem_cache.unified_radix_cache"), "UnifiedRadixCache", type("LMCache", (tree,), {}))
    with pytest.raises(KvGuardError, match=r"the prefix cache .*LMCache is not known"):
        serve()


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_are_not_covered(serve, name):
    value = "verifier" if isinstance(OPTIONS[name], str) else "flexkv" if OPTIONS[name] is None else 2
    with pytest.raises(KvGuardError, match=f"--{name.replace('_', '-')} is {value!r}, and the guard covers"):
        serve(**{name: value})


def started_with(monkeypatch, change):
    """A server whose ``change`` is made before it starts."""
    start = Serving.start

    def changed(self):
        change(self)
        return start(self)

    monkeypatch.setattr(Serving, "start", changed)


def test_windows_are_refused_by_their_option(engine, serve, monkeypatch):
    started_with(monkeypatch, lambda serving: setattr(serving.runner, "is_hybrid_swa", True))
    with pytest.raises(KvGuardError, match=r"sliding windows .*; serve with --disable-hybrid-swa-memory"):
        serve()


def test_speculation_that_is_not_known(engine, serve, monkeypatch):
    started_with(monkeypatch, lambda serving: setattr(serving.speculation, "name", "NGRAM"))
    with pytest.raises(KvGuardError, match="--speculative-algorithm is NGRAM, and the guard covers NONE, EAGLE"):
        serve()


def test_an_encoder(engine, serve, monkeypatch):
    started_with(monkeypatch, lambda serving: setattr(serving.runner.model_config, "is_encoder_decoder", True))
    with pytest.raises(KvGuardError, match="encoder has pages of its own"):
        serve()


def test_a_plugin_that_is_loaded_twice(serve):
    serve()
    with pytest.raises(KvGuardError, match="loaded in this process already; install the plugin once"):
        register(PluginSettings(mode=Mode.ABORT))
    counts = {len(hooks) for hooks in srt("plugins.hook_registry").HookRegistry._hooks.values()}
    assert counts == {1}


def test_a_guard_that_is_attached_twice(serve):
    serving = serve()
    with pytest.raises(KvGuardError, match="attached to a pool already"):
        serving.runner._init_post_memory_pool_components()


@pytest.mark.parametrize("how", ["null", "decode"])
def test_a_pool_that_is_in_use(engine, serve, monkeypatch, how):
    started_with(monkeypatch, lambda serving: serving.allocator.alloc(8))
    with pytest.raises(KvGuardError, match=r"the pool is in use: 8 tokens, 0 rows; attach the guard before"):
        serve(disaggregation_mode=how)


@pytest.mark.parametrize("how", ["prefill", "decode"])
def test_servers_of_a_transfer_need_a_secret(engine, serve, how):
    """Each would key its owners with one of its own, and every transfer would be another's."""
    with pytest.raises(KvGuardError, match=r"server without a `secret`.*put the same into the settings file of both"):
        serve(disaggregation_mode=how, settings={"secret": None})


@pytest.mark.parametrize("how", ["null", "decode"])
def test_rows_that_are_in_use(engine, serve, monkeypatch, how):
    started_with(monkeypatch, lambda serving: serving.rows.alloc([serving.submit("early", PROMPT)]))
    with pytest.raises(KvGuardError, match=r"the pool is in use: 0 tokens, 1 rows"):
        serve(disaggregation_mode=how)


def test_a_pool_that_is_given_another_size(serve):
    """Behind the capture of graphs; behind the first request it is refused."""
    serving = serve()
    serving.allocator.resize(SimpleNamespace(max_total_num_tokens=20 * 4))
    assert serving.guard.pool.tracker.tags.num_pages == 21
    req = serving.submit("a", PROMPT)
    serving.step(req)
    serving.finish(req)
    with pytest.raises(KvGuardError, match="in use"):
        serving.rows.alloc_rows(1)
        serving.allocator.resize(SimpleNamespace(max_total_num_tokens=30 * 4))


def test_arrays_that_take_too_much(serve):
    with pytest.raises(KvGuardError, match=r"MiB for 7 rows of 8388608 pages, above 1024.*larger pages"):
        serve(page_size=1, context=1 << 23)


def test_slots_by_a_path_that_is_not_known(serve):
    serving = serve()
    with pytest.raises(KvGuardError, match="4 slots were handed out by a path"):
        serving.allocator.alloc(4)


def test_a_draft_model_is_not_guarded(serve):
    serving = serve()
    draft = srt("model_executor.model_runner").ModelRunner(
        pools=(serving.rows, serving.allocator, None),
        options=serving.options,
        compute=lambda forward: torch.zeros(1),
        is_draft_worker=True,
        others=(None, None),
    )
    draft._init_post_memory_pool_components()
    steps = serving.guard.pool.tracker.metrics.checks
    draft.forward(SimpleNamespace())
    assert serving.guard.pool.tracker.metrics.checks == steps


def test_beams_are_refused_alone(serve):
    serving = serve()
    coordinator = srt("beam_search.coordinator").BeamCoordinator(serving.rows)
    assert "not covered by the KV guard" in coordinator.validate_and_init(None, None)


def _vote(rank, file, flags, answers):
    group = torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    answers.put((rank, agreed(flags, torch.distributed.group.WORLD)))
    torch.distributed.destroy_process_group(group)


def test_ranks_end_the_same_requests(tmp_path):
    """One of them alone has seen a fault."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    flags = [[False, True, False], [False, False, False]]
    ranks = [context.Process(target=_vote, args=(rank, tmp_path / "store", flags[rank], answers)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    said = dict(answers.get(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join()
    assert said == {0: flags[0], 1: flags[0]}
    assert agreed([True, False], None) == [True, False]
