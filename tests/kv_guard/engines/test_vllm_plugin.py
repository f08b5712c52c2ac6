"""The plugin of vLLM: what is allowed passes with the right tokens; modes; what a process notices of another."""

import json
import random
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantkit.kv_guard.engines.vllm import plugin
from quantkit.kv_guard.engines.vllm.events import EVENTS, StepReport, generation_after, signed
from quantkit.kv_guard.engines.vllm.gather import ReportGatherer
from quantkit.kv_guard.engines.vllm.wrapping import original_of
from quantkit.kv_guard.tracker import KvGuardError
from tests.kv_guard.engines.small_vllm import harness, runners, workers
from tests.kv_guard.engines.small_vllm import pool as core
from tests.kv_guard.engines.small_vllm import scheduler as scheduling
from tests.kv_guard.engines.small_vllm.harness import Engine, disturbed

SETTINGS = [
    {"v2": v2, "depth": depth, "windows": windows, "caching": caching}
    for v2, depth in ((True, 1), (True, 2), (False, 2))
    for windows in ((None,), (6,), (None, 9))
    for caching in (True, False)
    if caching or windows != (6,)
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_traffic_without_faults_passes(make, settings):
    """Shared prefixes, chunks, preemption for want of pages, eviction and re-use."""
    engine, rng = make(num_blocks=22, **settings), random.Random(5)
    prefixes = [[rng.randrange(100) for _ in range(rng.randrange(1, 18))] for _ in range(3)]
    for number in range(20):
        prompt = rng.choice(prefixes) + [rng.randrange(100) for _ in range(rng.randrange(1, 9))]
        engine.add(f"r{number}", prompt, max_tokens=rng.randrange(1, 12))
        for _ in range(rng.randrange(4)):
            engine.step()
    engine.run()
    assert engine.num_violations() == 0
    assert all(engine.is_right(name) for name in engine.prompts)
    assert not any(engine.is_error(name) for name in engine.prompts)
    assert sum(tracker.metrics.pages for tracker in engine.trackers) > 500


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize(("window", "more"), [(1, 0), (4, 0), (5, 2), (8, 1), (9, 3)])
def test_windows_of_long_requests_pass(make, v2, depth, window, more):
    """Pages that the window has left are null, in running requests and in front of hits; also where some are kept."""
    engine = make(v2=v2, depth=depth, windows=(window,), more=more, max_len=128, num_blocks=40)
    engine.add("long", range(30), max_tokens=40)
    for _ in range(8):
        engine.step()
    engine.add("hit", [*range(28), 70], max_tokens=40)
    nulls = {"long": 0, "hit": 0}
    while engine.queue or engine.scheduler.has_requests():
        engine.step()
        for name, blocks in engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks.items():
            nulls[name] = max(nulls[name], sum(block.is_null for block in blocks))
    assert min(nulls.values()) > 10
    assert engine.num_violations() == 0
    assert all(engine.is_right(name) and len(engine.released[name]) == 40 for name in engine.prompts)


def test_preemption_passes(make):
    engine = make(num_blocks=10)
    for number in range(4):
        engine.add(f"r{number}", range(number * 20, number * 20 + 9), max_tokens=11)
    preempted = set()
    while engine.queue or engine.scheduler.has_requests():
        engine.step()
        preempted |= {name for name, one in engine.scheduler.requests.items() if one.status.name == "PREEMPTED"}
    assert preempted
    assert engine.num_violations() == 0
    assert all(engine.is_right(name) and len(engine.released[name]) == 11 for name in engine.prompts)


def test_mode_log_names_it_and_goes_on(miniature, caplog, tmp_path):
    harness.environment(miniature, "log", tmp_path / "guard.json", incidents=tmp_path / "incidents.jsonl")
    engine = disturbed()
    engine.run()
    assert not engine.is_error("victim")
    assert "request victim, physical page" in caplog.text
    incidents = [json.loads(line) for line in (tmp_path / "incidents.rank0.group0.jsonl").read_text().splitlines()]
    assert {incident["request"] for incident in incidents} == {"victim"}


def test_replicas_write_to_files_of_their_own(miniature, tmp_path):
    """Workers of data parallelism have the ranks of their own replica."""
    for replica in (0, 1):
        harness.environment(miniature, "log", tmp_path / "guard.json", incidents=tmp_path / "i.jsonl")
        engine = disturbed(replica=replica)
        engine.run()
    assert {path.name for path in tmp_path.glob("i.*")} == {"i.rank0.group0.jsonl", "i.rank1.group0.jsonl"}


def test_mode_halt_ends_the_engine_at_the_result(miniature):
    harness.environment(miniature, "halt")
    engine = disturbed()
    released = list(engine.released["victim"])
    with pytest.raises(KvGuardError, match="request victim"):
        engine.run()
    assert engine.released["victim"] == released


def test_mode_off_wraps_nothing(miniature):
    miniature.delenv("QUANTKIT_KV_GUARD")
    engine = disturbed()
    holders = (core.BlockPool, core.KVCacheManager, scheduling.Scheduler, runners.RunnerV1, runners.RunnerV2)
    wrapped = {name for holder in holders for name in vars(holder) if original_of(vars(holder)[name]) is not None}
    assert wrapped == set()
    assert original_of(workers.MultiprocExecutor.collective_rpc) is None
    assert not hasattr(engine.runners[0], "quantkit_kv_guard")
    engine.run()
    assert not engine.is_right("victim")  # the fault is real


def test_plugins_may_be_loaded_again(miniature):
    plugin.register()
    first = scheduling.SchedulerConfig.get_scheduler_cls
    plugin.register()
    assert scheduling.SchedulerConfig.get_scheduler_cls is first
    for _ in range(2):
        scheduling.SchedulerConfig(4, 32, 7).get_scheduler_cls()
    assert original_of(original_of(scheduling.Scheduler.schedule)) is None


def test_a_guard_is_attached_once(miniature):
    engine = Engine()
    with pytest.raises(KvGuardError, match="attached already"):
        engine.runners[0].initialize_kv_cache(engine.kv_cache_config)
    engine.runners[0].initialize_kv_cache(engine.kv_cache_config, is_profiling=True)
    with pytest.raises(KvGuardError, match="attached already"):
        engine.scheduler.__init__(engine.vllm_config, engine.kv_cache_config, None, 4)


def test_a_pool_that_is_in_use_is_refused(miniature):
    make_pool = core.BlockPool.__init__

    def used(pool, *arguments):
        make_pool(pool, *arguments)
        pool.free_block_queue.popleft()

    miniature.setattr(core.BlockPool, "__init__", used)
    with pytest.raises(KvGuardError, match="in use already"):
        Engine()


def test_a_worker_without_a_guard_is_noticed(miniature):
    engine = Engine(ranks=2)
    del engine.runners[1].quantkit_kv_guard
    engine.add("a", range(5))
    with pytest.raises(KvGuardError, match="did not check"):
        engine.run()


def test_a_scheduler_without_a_guard_is_noticed(miniature):
    engine = Engine()
    del engine.scheduler.quantkit_kv_guard
    engine.add("a", range(5))
    with pytest.raises(KvGuardError, match="without the events"):
        engine.run()


def test_a_step_that_was_left_out_is_noticed(miniature):
    engine = Engine()
    engine.add("a", range(5))
    engine.step()
    engine.scheduler.schedule()
    with pytest.raises(KvGuardError, match="step 2 came, 1 was next"):
        engine.step()


def test_a_dummy_run_is_none_of_its_business(miniature):
    engine = Engine()
    assert engine.runners[0].execute_model(None, dummy_run=True) is None


def test_the_result_of_a_step_is_one_for_vllm(miniature):
    engine = Engine()
    engine.add("a", range(5))
    engine.executor.run("execute_model", engine.scheduler.schedule())
    result = engine.runners[0].sample_tokens(None)
    assert isinstance(result, workers.AsyncModelRunnerOutput)
    assert result.get_kv_connector_output() is None
    assert getattr(result.get_output(), EVENTS) == StepReport()


def test_an_aggregator_of_connectors_is_asked_too():
    class Inner:
        answered = 41

        def aggregate(self, outputs, output_rank=0):
            return outputs[output_rank]

    outputs = [SimpleNamespace(), SimpleNamespace()]
    for number, output in enumerate(outputs):
        setattr(output, EVENTS, StepReport(ended=(f"r{number}",)))
    gatherer = ReportGatherer(Inner())
    assert getattr(gatherer.aggregate(outputs, 1), EVENTS).ended == ("r0", "r1")
    assert gatherer.answered == 41
    assert gatherer.aggregate([None, None], 0) is None


def test_generations_are_counted_as_the_tracker_counts():
    assert generation_after((1 << 64) - 1) == 1
    assert (signed((1 << 64) - 1), signed(5)) == (-1, 5)


@pytest.mark.parametrize("start", [(1 << 64) - 3, (1 << 63) - 2])
def test_generations_may_be_counted_round(miniature, start):
    engine = Engine()
    engine.scheduler.quantkit_kv_guard.shadow.next_generations[0] = start
    for number in range(3):
        engine.add(f"r{number}", [*range(9), number], max_tokens=5)
    engine.run()
    assert engine.num_violations() == 0
    assert engine.scheduler.quantkit_kv_guard.shadow.next_generations[0] < start or start < 1 << 63


def test_the_entry_point_names_the_plugin():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["quantkit_kv_guard"].partition(":")
    assert (module, name) == (plugin.__name__, plugin.register.__name__)
