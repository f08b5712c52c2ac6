"""What vLLM's plugin leaves behind of a violation: lines of a log, metrics, a pool to inspect."""

import pytest

from quantkit.kv_guard.dump import check_dump, read_dump
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


def test_a_pool_that_cannot_be_dumped_ends_no_server(miniature, tmp_path, caplog):
    (tmp_path / "pool.rank0.group0.safetensors").mkdir()
    harness.environment(miniature, "log", tmp_path / "guard.json", dump=tmp_path / "pool.safetensors")
    engine = disturbed()
    engine.run()
    assert len(engine.released["victim"]) == 8
    assert caplog.text.count("the pool was not dumped to") == 1


def test_the_log_says_how_many_it_leaves_out(miniature, tmp_path, caplog):
    harness.environment(miniature, "log", tmp_path / "guard.json", ring_lines=9)
    engine = disturbed(pages=6)
    engine.step()
    lines = [record.getMessage() for record in caplog.records]
    assert sum("physical page" in line for line in lines) == 8
    assert any(line.endswith(": 1 more violations") for line in lines)
    assert any("1 more violations had no room in the ring" in line for line in lines)
