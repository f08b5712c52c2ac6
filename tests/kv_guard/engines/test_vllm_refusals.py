"""What the plugin of vLLM cannot guard, or does not know, it refuses with the name of it."""

import re
import subprocess
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from quantkit.kv_guard.engines.targets import Supported, Target, check_targets
from quantkit.kv_guard.engines.vllm import plugin, targets
from quantkit.kv_guard.engines.vllm.settings import groups_of
from quantkit.kv_guard.engines.vllm.wrapping import original_of
from quantkit.kv_guard.tracker import KvGuardError
from tests.kv_guard.engines.small_vllm import harness, runners, workers
from tests.kv_guard.engines.small_vllm import pool as core
from tests.kv_guard.engines.small_vllm import scheduler as scheduling
from tests.kv_guard.engines.small_vllm.harness import Engine


@pytest.mark.parametrize("target", harness.TARGETS, ids=lambda target: target.name.rpartition("vllm.")[2])
def test_every_target_is_checked(miniature, target):
    """One that is gone, or takes something else, is named with the versions that are known."""
    check_targets([target], targets.SUPPORTED)
    with pytest.raises(KvGuardError, match=r"_gone \(.*\) is not there.*run vLLM 0\.33"):
        check_targets([replace(target, name=f"{target.name}_gone")], targets.SUPPORTED)
    if target.parameters is not None:
        for differs in (f"{target.parameters}, *more", target.parameters.replace("=", ""), f"*, {target.parameters}"):
            if differs != target.parameters:
                with pytest.raises(KvGuardError, match=rf"takes \({re.escape(target.parameters)}\), not"):
                    check_targets([replace(target, parameters=differs)], targets.SUPPORTED)


@dataclass
class MoreAsked:
    weight: int
    request_id: str
    new_token_ids: list
    finish_reason: object = None
    events: object = None
    trace_headers: object = None
    error: object = None


@dataclass
class LessTaken:
    request_id: str
    new_token_ids: list
    finish_reason: object = None
    events: object = None
    trace_headers: object = None


@pytest.mark.parametrize(("other", "message"), [(MoreAsked, "asks for weight"), (LessTaken, "has no error")])
def test_what_an_abort_makes_is_checked_at_start(miniature, other, message):
    """Not when the first request is ended."""
    miniature.setattr(sys.modules["vllm.v1.engine"], "EngineCoreOutput", other)
    with pytest.raises(KvGuardError, match=rf"\(tells a client of its request\) {message}; run vLLM"):
        Engine()


@pytest.mark.parametrize("name", ["get_new_blocks", "free_blocks"])
def test_a_scheduler_with_another_pool_is_refused_before_it_is_made(miniature, name):
    miniature.setattr(core.BlockPool, name, lambda self, something: None)
    with pytest.raises(KvGuardError, match=rf"BlockPool\.{name}"):
        Engine()
    assert original_of(scheduling.Scheduler.schedule) is None


def test_in_mode_log_a_refusal_is_said_and_the_server_runs(miniature, caplog):
    harness.environment(miniature, "log")
    miniature.setattr(core.BlockPool, "reset", None, raising=False)
    miniature.setattr(workers.Worker, "compile_or_warm_up_model", lambda self, more: None)
    plugin.register()
    workers.WorkerWrapperBase().init_device()
    assert "takes (self, more), not (self)" in caplog.text
    assert original_of(runners.RunnerV2.execute_model) is None


@pytest.mark.parametrize("version", ["0.32.1", "0.34.0"])
def test_another_version_is_refused(miniature, version):
    miniature.setattr("vllm.__version__", version)
    with pytest.raises(KvGuardError, match=rf"vLLM {version}.*run vLLM 0\.33"):
        plugin.register()


def test_a_mode_that_there_is_none_of_is_refused(miniature):
    harness.environment(miniature, "abrot")
    with pytest.raises(KvGuardError, match=r"'abrot'.*off, log, abort, halt"):
        plugin.register()


@pytest.mark.parametrize("value", ["", "  "])
def test_a_blank_variable_is_refused(miniature, value):
    miniature.setenv("QUANTKIT_KV_GUARD", value)
    with pytest.raises(KvGuardError, match="QUANTKIT_KV_GUARD is blank"):
        plugin.register()


@pytest.mark.parametrize("value", [None, "off"])
def test_what_is_off_imports_nothing(value):
    """The entry point runs in every process of vLLM, front ends among them."""
    code = (
        "from quantkit.kv_guard.engines.vllm.plugin import register; register()\n"
        "import sys; assert not {'torch', 'numpy', 'vllm'} & sys.modules.keys()"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)} | ({} if value is None else {"QUANTKIT_KV_GUARD": value})
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda vllm, cache: setattr(vllm.parallel_config, "decode_context_parallel_size", 2), "several places"),
        (
            lambda vllm, cache: setattr(vllm.parallel_config, "distributed_executor_backend", "external_launcher"),
            "rank",
        ),
        (lambda vllm, cache: setattr(vllm.parallel_config, "enable_elastic_ep", True), "elastic"),
        (lambda vllm, cache: setattr(vllm.model_config, "is_diffusion", True), "diffusion"),
        (lambda vllm, cache: setattr(cache, "hisparse_host_num_blocks", 5), "HiSparse"),
        (lambda vllm, cache: cache.kv_cache_groups.clear(), "without a KV cache"),
        (
            lambda vllm, cache: cache.kv_cache_groups.append(
                SimpleNamespace(kv_cache_spec=harness.MambaSpec(block_size=4))
            ),
            "group 1 of MambaSpec",
        ),
    ],
)
def test_what_cannot_be_guarded_is_refused(change, message):
    vllm_config, kv_cache_config = harness.config()
    assert len(groups_of(vllm_config, kv_cache_config)) == 1
    change(vllm_config, kv_cache_config)
    with pytest.raises(KvGuardError, match=message):
        groups_of(vllm_config, kv_cache_config)


def test_a_scheduler_that_schedules_itself_is_refused(miniature):
    class Own(scheduling.Scheduler):
        def schedule(self, throttle_prefills=False):
            return super().schedule()

    miniature.setattr(scheduling.SchedulerConfig, "get_scheduler_cls", lambda self: Own)
    with pytest.raises(KvGuardError, match="Own has its own schedule"):
        Engine()


def test_arrays_that_take_too_much(miniature):
    with pytest.raises(KvGuardError, match=r"MiB for 36 rows of 4194304 pages, above 1024 MiB; serve with larger"):
        Engine(max_len=1 << 24)


def test_a_target_of_no_engine_is_refused():
    with pytest.raises(KvGuardError, match=r"no_such_engine\.core \(runs\) is not there.*run Engine 1"):
        check_targets([Target(name="no_such_engine.core", purpose="runs")], Supported("Engine", ("1",)))
