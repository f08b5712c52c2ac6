"""`quantkit kv-guard` as a user meets it: exit codes, tables, documents, files that are damaged."""

import json
import subprocess
import sys

import pytest
from safetensors import safe_open

from quantkit.errors import UsageError
from quantkit.kv_guard.dump import Dump, write_dump
from quantkit.kv_guard.incidents import IncidentFile
from quantkit.kv_guard.simulation import sample
from quantkit.kv_guard.simulation.faults.kinds import KINDS
from tests.cli.test_commands import document, run
from tests.kv_guard.pools import IDENTITY, Pool, numbers

QUICK = ("--checks", 2_000, "--faults", 1)


@pytest.fixture
def pool():
    pool = Pool()
    pool.begin(0, range(10), [3, 4, 5], request="alpha")
    return pool


def dumped(pool, path):
    write_dump(path, Dump.of(pool.tracker, pool.step(0)))
    return path


@pytest.mark.parametrize("content", ["off", "crc32c"])
def test_the_self_test_counts_what_it_injected(content):
    result = run("kv-guard", "selftest", *QUICK, "--content", content, "--json")
    assert (result.returncode, result.stderr.count("Traceback")) == (0, 0), result.stderr
    made = document(result, "kv-guard")
    assert (made["status"], made["action"], made["content"], made["false_positives"]) == ("ok", "selftest", content, 0)
    wanted = [kind for kind in KINDS if content == "crc32c" or kind not in ("13", "bit")]
    assert [one["kind"] for one in made["kinds"]] == wanted
    assert all(one["injected"] == one["caught"] >= 1 and one["missed"] == 0 for one in made["kinds"])
    assert made["checks"] > made["clean_checks"] >= 2_000


def test_the_self_test_says_when_each_kind_is_seen():
    result = run("kv-guard", "selftest", *QUICK, "--seed", "7", "-q")
    assert (result.returncode, result.stderr) == (0, "")
    rows = result.stdout.splitlines()
    for kind, moment in (("a page is released twice", "at the release"), ("the host's page is", "at the source of a")):
        assert [moment in row for row in rows if row.strip().startswith(kind)] == [True]
    assert rows[-1] == "PASSED: 0 missed, 0 false positives, 0 leaks"


def test_what_a_guard_writes_can_be_tried_without_an_engine(tmp_path):
    directory = tmp_path / "a" / "sample"
    result = run("kv-guard", "selftest", "--checks", 1, "--faults", 1, "--keep", directory)
    assert result.returncode == 0, result.stderr
    assert f"{directory} has incidents.jsonl, pool.safetensors, kv.prom" in result.stderr
    made = document(run("kv-guard", "explain", directory / "incidents.jsonl", "--json"), "kv-guard")
    assert made["counts"]["requests"] == 4
    assert set(made["faults"]) == {"freed", "other_owner", "never_granted", "write_out_of_place", "spoiled"}
    result = run("kv-guard", "inspect", directory / "pool.safetensors", "--json")
    made = document(result, "kv-guard")
    found = {(one["request"], one["fault"]) for one in made["violations"]}
    wanted = {("chat-18", "other_owner"), ("agent-2", "never_granted"), ("batch-4", "hole")}
    assert (result.returncode, found, len(made["spoiled"]), made["stray"]) == (4, wanted, 1, [])
    assert 'fault="freed"} 2' in (directory / "kv.prom").read_text()
    again = run("kv-guard", "selftest", "--keep", directory)
    assert (again.returncode, "incidents.jsonl: exists already" in again.stderr) == (2, True)


def summed(path):
    """Metadata stand in any order in a file."""
    with safe_open(path, "pt") as file:
        return file.metadata()["sha256"]


def test_one_seed_gives_one_dump(tmp_path):
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        sample.prepare(tmp_path / name)
        sample.write_sample(tmp_path / name, seed)
    one, two, other = (summed(tmp_path / name / sample.DUMP) for name in ("one", "two", "other"))
    assert one == two != other
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match="cannot be made"):
        sample.prepare(file / "sample")


@pytest.mark.parametrize("arguments", [("--checks", "0"), ("--faults", "0"), ("--content", "md5"), ("--seed", "-1")])
def test_options_that_make_no_sense_are_usage_errors(arguments):
    result = run("kv-guard", "selftest", *arguments)
    assert result.returncode == 2
    assert arguments[0] in result.stderr
    assert result.stderr.rstrip().endswith("see quantkit kv-guard selftest --help")


def test_a_sound_pool_and_one_that_is_not(pool, tmp_path):
    result = run("kv-guard", "inspect", dumped(pool, tmp_path / "sound.safetensors"), "--json")
    made = document(result, "kv-guard")
    assert (result.returncode, made["status"], made["checked"]) == (0, "ok", 3)
    pool.tracker.release(numbers(4))
    path = dumped(pool, tmp_path / "wrong.safetensors")
    result = run("kv-guard", "inspect", path, "--json")
    made = document(result, "kv-guard")
    assert (result.returncode, made["status"]) == (4, "failed")
    assert [(one["fault"], one["request"], one["page"]) for one in made["violations"]] == [("freed", "alpha", 4)]
    text = run("kv-guard", "inspect", path)
    assert (text.returncode, text.stdout.rstrip().splitlines()[-1]) == (4, "not sound: 1 page, 0 tags")


def test_incidents_are_explained(pool, tmp_path):
    pool.tracker.release(numbers(4))
    violations = pool.run(0).violations
    path = tmp_path / "incidents.jsonl"
    IncidentFile(path, IDENTITY).write(violations)
    made = document(run("kv-guard", "explain", path, "--json"), "kv-guard")
    assert (made["action"], made["faults"]) == ("explain", {"freed": 2})
    assert made["counts"] == {"lines": 2, "faults": 1, "requests": 1}
    assert all("request alpha: logical page 1, page 4" in one["explanation"] for one in made["incidents"])
    lines = run("kv-guard", "explain", path).stdout.splitlines()
    assert "Z, before and after step 0, request alpha: logical page 1, page 4" in lines[0]
    assert lines[-1] == "2 lines, 1 fault, 1 request"


def run_without(packages, *arguments):
    blocked = f"import sys; sys.modules.update(dict.fromkeys({packages!r}))\n"
    command = [sys.executable, "-c", blocked + "from quantkit.cli.app import main; main()", "kv-guard"]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_an_incident_is_explained_where_no_model_runs(pool, tmp_path):
    pool.tracker.release(numbers(4))
    path = tmp_path / "incidents.jsonl"
    IncidentFile(path, IDENTITY).write(pool.run(0).violations)
    for how in ([], ["--json"]):
        result = run_without(("torch", "triton", "safetensors", "numpy"), "explain", path, *how)
        assert (result.returncode, result.stderr) == (0, "")
        assert "request alpha: logical page 1, page 4" in result.stdout


def test_each_command_names_the_package_that_it_lacks(pool, tmp_path):
    path = dumped(pool, tmp_path / "pool.safetensors")
    for package, arguments in (
        ("torch", ["inspect", path]),
        ("safetensors", ["inspect", path]),
        ("triton", ["selftest"]),
    ):
        result = run_without((package,), *arguments)
        assert result.returncode == 2
        assert f"kv-guard {arguments[0]} needs {package} (not installed here)" in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", ["inspect", "explain"])
@pytest.mark.parametrize("content", [None, b"", b"\x00" * 40, b'{"format": "other"}\n', b"\xff\xfe"])
def test_other_files_are_refused(command, content, tmp_path):
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    result = run("kv-guard", command, path, "--json")
    assert result.returncode == 3, result.stderr
    assert "Traceback" not in result.stderr
    made = json.loads(result.stdout)
    assert (made["status"], made["error"]["file"]) == ("error", str(path))
    assert made["error"]["remedy"]
