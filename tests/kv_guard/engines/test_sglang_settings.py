"""What SGLang's plugin makes of its settings: how it is entered, and the files that it writes."""

import json
import logging
import subprocess
import sys
from contextlib import nullcontext

import pytest

from quantkit.kv_guard.dump_reader import read_dump
from quantkit.kv_guard.dump_report import check_dump
from quantkit.kv_guard.tracker import KvGuardError, Mode

PROMPT = list(range(10, 23))


def test_files_that_are_written(serve, tmp_path):
    serving = serve(settings={"incidents": tmp_path / "i.jsonl", "metrics": tmp_path / "m.prom"}, tp_size=2)
    req = serving.submit("a", PROMPT)
    serving.step(req)
    serving.rows.req_to_token[req.kv.req_pool_idx, :4] = 0
    serving.step(req)
    assert "checks_total" in (tmp_path / "m.rank0.group0.prom").read_text()
    line = json.loads((tmp_path / "i.rank0.group0.jsonl").read_text().splitlines()[0])
    assert line["request"] == "a"
    assert line["pool"]["layout"] == "MLATokenToKVPool of 1 layers in torch.int64, pages of 4"


def sample(path, name):
    (line,) = [line for line in path.read_text().splitlines() if line.startswith(f"quantkit_kv_guard_{name}{{")]
    return int(line.rsplit(" ", 1)[1])


def test_metrics_say_whether_there_is_a_guard_and_of_which_rank(serve, tmp_path):
    """From the start on, and when it went off; what is written is Prometheus' text format (test_metrics.py)."""
    path = tmp_path / "m.rank0.group0.prom"
    serving = serve(mode=Mode.LOG, settings={"metrics": tmp_path / "m.prom"})
    assert sample(path, "attached") == 1
    serving.finish(serving.submit("a", PROMPT))
    assert 'checks_total{pool="target",rank="0"} 1' in path.read_text()
    serving.guard.refusals.refuse(KvGuardError("no more", remedy="none"))
    assert sample(path, "attached") == 0
    assert sample(path, "checks_total") > 1


@pytest.mark.parametrize("mode", [Mode.LOG, Mode.ABORT, Mode.HALT])
def test_the_pool_is_dumped_at_the_first_violation(serve, tmp_path, mode):
    """Once, also before a halt ends the server; what it holds is what the step was given."""
    serving = serve(mode=mode, settings={"dump": tmp_path / "pool.safetensors"}, tp_size=2)
    req, other = serving.submit("a", PROMPT), serving.submit("b", PROMPT[::-1])
    serving.step(req, other)
    rows = serving.rows.req_to_token
    rows[req.kv.req_pool_idx, :4] = rows[other.kv.req_pool_idx, :4]
    with pytest.raises(KvGuardError) if mode is Mode.HALT else nullcontext():
        serving.step(req, other)
    (path,) = tmp_path.iterdir()
    assert path.name == "pool.rank0.group0.safetensors"
    dump = read_dump(path)
    assert set(dump.names.values()) == {"a", "b"}
    (violation,) = check_dump(dump).violations
    assert (violation.request, violation.evidence.index) == ("a", 0)


def test_what_a_server_writes_does_not_hold_the_secret(serve, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    files = {name: tmp_path / name for name in ("incidents", "metrics", "dump")}
    serving = serve(settings={**files, "secret": "correct horse battery"})
    req = serving.submit("a", PROMPT)
    serving.step(req)
    serving.rows.req_to_token[req.kv.req_pool_idx, :4] = 0
    serving.step(req)
    written = list(tmp_path.iterdir())
    assert len(written) == 3
    assert all(b"horse" not in path.read_bytes() for path in written)
    assert "KV guard: on, mode abort, rank 0, group 0" in caplog.text
    assert "horse" not in caplog.text


@pytest.mark.parametrize(
    ("value", "says"),
    [(None, ""), ("off", ""), ("", "is blank"), (" ", "is blank"), ("abrot", "'abrot'"), ("abort", "No module named")],
)
def test_the_entry_point(value, says):
    """In a process without SGLang: a refusal ends it; what is off imports nothing."""
    code = (
        "import sys; from importlib.metadata import entry_points\n"
        "from quantkit.kv_guard.engines.sglang.plugin import load; load()\n"
        "assert 'torch' not in sys.modules or sys.argv[1]"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, says],
        env=({} if value is None else {"QUANTKIT_KV_GUARD": value}) | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (1 if says else 0), done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
