"""What vLLM's plugin leaves behind of a violation: lines of a log, metrics, a pool to inspect."""

import re

import pytest

from quantkit.kv_guard.dump_reader import read_dump
from quantkit.kv_guard.dump_report import check_dump
from quantkit.kv_guard.tracker import KvGuardError
from tests.kv_guard.engines.small_vllm import harness
from tests.kv_guard.engines.small_vllm.harness import disturbed


@pytest.mark.parametrize("mode", ["log", "abort", "halt"])
def test_the_pool_is_dumped_at_the_first_violation(miniature, tmp_path, mode):
    """Also before a halt ends the engine; what it holds is what the step was given."""
    files = {"dump": tmp_path / "pool.safetensors", "metrics": tmp_path / "kv.prom"}
    harness.environment(miniature, mode, tmp_path / "guard.json", **files)
    engine = disturbed(windows=(None, 9))
    if mode == "halt":
        with pytest.raises(KvGuardError, match="request victim"):
            engine.run()
    else:
        engine.run()
    dump = read_dump(tmp_path / "pool.rank0.group0.safetensors")
    assert set(dump.names.values()) == {"victim", "other"}
    violations = check_dump(dump).violations
    assert {(one.request, one.check) for one in violations} == {("victim", "before_step")}
    assert not (tmp_path / "pool.rank0.group1.safetensors").exists()  # where nothing was found
    assert 'fault="another-holder"} 0' not in (tmp_path / "kv.rank0.group0.prom").read_text()
    assert 'pool="group1"' in (tmp_path / "kv.rank0.group1.prom").read_text()


def test_metrics_say_whether_there_is_a_guard_and_of_which_rank(miniature, tmp_path):
    """From the start on; a guard that goes off in mode log says so, and what is in work behind it too."""
    harness.environment(miniature, "log", tmp_path / "guard.json", metrics=tmp_path / "kv.prom")
    engine = harness.Engine(replica=3, depth=2)
    path = tmp_path / "kv.rank3.group0.prom"
    assert attached(path) == ["1"]
    engine.add("a", range(10))
    for _ in range(3):
        engine.step()
    assert 'checks_total{pool="group0",rank="3"} 1' in path.read_text()
    del engine.scheduler.quantkit_kv_guard
    engine.run()
    assert attached(path) == ["0"]
    assert len(engine.released["a"]) == 6


def attached(path):
    return re.findall(r"^quantkit_kv_guard_attached\{.*\} (\d)$", path.read_text(), re.M)
