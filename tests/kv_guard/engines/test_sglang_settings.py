"""What the plugin is told, and the files that it writes."""

import json
import logging
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from quantkit.kv_guard.dump_reader import read_dump
from quantkit.kv_guard.dump_report import check_dump
from quantkit.kv_guard.engines.settings import PluginSettings, path_of, read_settings
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
def test_what_was_found_is_written_at_once(serve, tmp_path, mode):
    """The server may have nothing to do for hours behind it."""
    path = tmp_path / "m.rank0.group0.prom"
    serving = serve(mode=mode, settings={"metrics": tmp_path / "m.prom"})
    req = serving.submit("a", PROMPT)
    serving.step(req)
    serving.rows.req_to_token[req.kv.req_pool_idx, :4] = 0
    with pytest.raises(KvGuardError) if mode is Mode.HALT else nullcontext():
        serving.step(req)
    assert sample(path, "checks_total") == 2
    assert sum(int(line.rsplit(" ", 1)[1]) for line in path.read_text().splitlines() if "fault=" in line) > 0
    assert sample(path, "aborted_requests_total") == (mode is Mode.ABORT)


def test_metrics_are_written_seldom(serve, tmp_path):
    path = tmp_path / "m.rank0.group0.prom"
    serving = serve(settings={"metrics": tmp_path / "m.prom"})
    serving.finish(serving.submit("a", PROMPT, 6))
    assert sample(path, "checks_total") == 1


def test_metrics_that_cannot_be_written_end_no_server(serve, tmp_path, caplog):
    (tmp_path / "m.rank0.group0.prom.partial").mkdir()
    serving = serve(settings={"metrics": tmp_path / "m.prom"})
    serving.finish(serving.submit("a", PROMPT))
    assert serving.sent["a"] == serving.right("a", 4)
    assert "metrics were not written" in caplog.text


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


def test_a_pool_that_cannot_be_dumped_ends_no_server(serve, tmp_path, caplog):
    serving = serve(mode=Mode.LOG, settings={"dump": tmp_path / "gone" / "pool.safetensors"})
    req = serving.submit("a", PROMPT)
    serving.step(req)
    serving.rows.req_to_token[req.kv.req_pool_idx, :4] = 0
    serving.finish(req)
    assert len(serving.sent["a"]) == 4
    assert caplog.text.count("the pool was not dumped to") == 1


def test_a_file_is_one_trackers():
    """Of each rank and group of layers, under one rule for both engines."""
    assert str(path_of(Path("there/i.jsonl"), 3, 1)) == "there/i.rank3.group1.jsonl"
    assert path_of(None, 3) is None


def test_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_settings({}).mode is Mode.OFF
    assert read_settings({"QUANTKIT_KV_GUARD": "abort"}) == PluginSettings(mode=Mode.ABORT)
    path = tmp_path / "guard.json"
    path.write_text(json.dumps({"mode": "halt", "incidents": "x.jsonl", "ring_lines": 8, "model": None}))
    settings = read_settings({"QUANTKIT_KV_GUARD": str(path)})
    assert (settings.mode, settings.incidents.name, settings.ring_lines) == (Mode.HALT, "x.jsonl", 8)


def test_a_secret_is_shown_nowhere(tmp_path):
    path = tmp_path / "guard.json"
    path.write_text(json.dumps({"mode": "abort", "secret": "correct horse battery"}))
    settings = read_settings({"QUANTKIT_KV_GUARD": str(path)})
    assert settings.secret_bytes == b"correct horse battery"
    assert "horse" not in repr(settings)
    path.write_text(json.dumps({"mode": "abort", "secret": "my horse"}))
    with pytest.raises(KvGuardError) as refused:
        read_settings({"QUANTKIT_KV_GUARD": str(path)})
    assert "horse" not in str(refused.value)


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
    ("document", "message"),
    [
        ({"mode": "stop"}, "mode is 'stop'; choose off, log, abort, halt"),
        ({}, "mode is None"),
        ({"mode": "log", "ring": 3}, "unknown key 'ring'"),
        ({"mode": "log", "ring_lines": True}, "ring_lines is True"),
        ({"mode": "log", "ring_lines": 0}, "ring_lines is 0; give a whole number above 0"),
        ({"mode": "log", "most_mib": 1.5}, "most_mib is 1.5"),
        ({"mode": "log", "model": ""}, "model is ''"),
        ({"mode": "log", "secret": "short"}, "secret is no text, or too short a one"),
        ({"mode": "log", "secret": 12345678901234567}, "secret is no text"),
        ({"mode": "log", "incidents": 3}, "incidents is 3"),
        ({"mode": "log", "incidents": "not/there/i.jsonl"}, "not/there/i.jsonl': no file can be written there"),
        ({"mode": "log", "metrics": "/"}, "metrics is '/': no file can be written there"),
        ({"mode": "log", "incidents": "i" * 5000 + ".jsonl"}, "name a file in a folder that exists"),
        ({"mode": "log", "incidents": "a\0b"}, "incidents is 'a"),
        ({"mode": "log", "model": "\ud800"}, "give a text"),
        ('{"mode": "abort", "mode": "off"}', "'mode' comes twice"),
        ("[" * 100_000, "cannot be read"),
        ([], "is no JSON object"),
        ("{", "cannot be read"),
        ("", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_settings_that_mean_nothing(tmp_path, document, message):
    path = tmp_path / "guard.json"
    written = document if isinstance(document, (str, bytes)) else json.dumps(document)
    path.write_bytes(written if isinstance(written, bytes) else written.encode())
    with pytest.raises(KvGuardError, match=message):
        read_settings({"QUANTKIT_KV_GUARD": str(path)})


@pytest.mark.parametrize("value", ["", "  ", "\n"])
def test_a_blank_variable_is_no_mode(value):
    """A unit file that lost its value must not leave a server unguarded."""
    with pytest.raises(KvGuardError, match=r"QUANTKIT_KV_GUARD is blank; set it to off, log.* or leave it out"):
        read_settings({"QUANTKIT_KV_GUARD": value})


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


@pytest.mark.parametrize("entry", ["sglang.plugin import load as enter", "vllm.plugin import register as enter"])
@pytest.mark.parametrize("mode", ["log", "abort"])
def test_an_engine_that_is_missing_follows_the_mode(entry, mode):
    """In log it is said once, and the process goes on; a server that was told to abort does not run unguarded."""
    code = f"from quantkit.kv_guard.engines.{entry}; enter(); print('goes on')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"QUANTKIT_KV_GUARD": mode, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = "it cannot be loaded: No module named"
    assert ("goes on" in done.stdout, done.returncode == 0) == (mode == "log", mode == "log"), done.stderr
    assert done.stderr.count(said) == 1
    assert done.stderr.count("load the guard in the engine's environment") == 1
