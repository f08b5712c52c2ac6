"""`quantkit kv-guard` as a user meets it: exit codes, tables, documents, files that are damaged."""

import json
import subprocess
import sys

import pytest

from quantkit.kv_guard.dump import Dump, write_dump
from quantkit.kv_guard.incidents import IncidentFile
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
    tracker = pool.tracker
    write_dump(
        path,
        Dump(
            identity=IDENTITY,
            size=tracker.settings.size,
            tags=tracker.tags,
            expectations=tracker.expectations,
            step=pool.step(0),
            names={0: "alpha"},
        ),
    )
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
    (twice,) = (line for line in result.stdout.splitlines() if "a page is released twice" in line)
    (host,) = (line for line in result.stdout.splitlines() if "the host's page is reused" in line)
    assert "at the release" in twice
    assert "at the source of a copy" in host
    assert result.stdout.rstrip().endswith("PASSED: 0 missed, 0 false positives")


def test_samples_are_explained_and_inspected(tmp_path):
    """What a user without a server can try; what is there is not written over."""
    folder = tmp_path / "new" / "samples"
    arguments = ("kv-guard", "selftest", "--checks", 1, "--faults", 1, "--keep", folder, "--json")
    assert document(run(*arguments), "kv-guard")["status"] == "ok"
    explained = run("kv-guard", "explain", folder / "incidents.jsonl")
    assert explained.returncode == 0
    assert "before the step: request alice, logical page 1, page 10: the page is another prefix's" in explained.stdout
    assert explained.stdout.rstrip().endswith("lines: 4; faults: 2; requests that are named: 2")
    inspected = document(run("kv-guard", "inspect", folder / "pool.safetensors", "--json"), "kv-guard")
    named = [(one["request"], one["page"], one["fault"]) for one in inspected["violations"]]
    assert named == [("alice", 10, "other_owner"), ("carol", 6, "freed")]
    assert 'quantkit_kv_guard_violations_total{pool="target",fault="freed"} 2' in (folder / "kv.prom").read_text()
    again = run(*arguments)
    assert (again.returncode, json.loads(again.stdout)["error"]["file"]) == (2, str(folder / "incidents.jsonl"))


def test_a_bit_that_turned_over_in_a_dump_is_damage(pool, tmp_path):
    """Not a pool that is sound, nor one that is not."""
    path = dumped(pool, tmp_path / "pool.safetensors")
    whole = path.read_bytes()
    for at in (len(whole) - 1, len(whole) // 2, whole.index(b"page_size") + 12):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        result = run("kv-guard", "inspect", path, "--json")
        assert result.returncode == 3, result.stdout
        assert json.loads(result.stdout)["error"]["file"] == str(path)


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
    assert (text.returncode, text.stdout.rstrip().splitlines()[-1]) == (
        4,
        "not sound: pages of requests that are wrong: 1, torn tags: 0",
    )


def test_incidents_are_explained(pool, tmp_path):
    pool.tracker.release(numbers(4))
    violations = pool.run(0).violations
    path = tmp_path / "incidents.jsonl"
    IncidentFile(path, IDENTITY).write(violations)
    made = document(run("kv-guard", "explain", path, "--json"), "kv-guard")
    assert (made["action"], made["faults"]) == ("explain", {"freed": 2})
    assert all("request alpha, logical page 1, page 4" in one["explanation"] for one in made["incidents"])
    assert "request alpha, logical page 1, page 4" in run("kv-guard", "explain", path).stdout


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
        assert "request alpha, logical page 1, page 4" in result.stdout


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
