"""The script for a machine with a GPU, with a python that only says what it was asked for."""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "gpu_session"
# the question for a GPU is none of what it was asked to run
STUB = """#!/bin/sh
case "$1" in -c) echo "torch sees no GPU" >&2; exit ${GPU_STATUS:-0};; esac
echo "$@" >> "$ASKED"
echo "3 passed"
case "$1" in *bench_kernels*) echo "an error of $*" >&2;; esac
[ -z "$SLOW" ] || { sleep 60 & echo $! >> "$SLOW"; wait; }
case "$*" in *$BROKEN*) exit 1;; esac
"""


@pytest.fixture
def session(tmp_path):
    stub = tmp_path / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)

    def run(*arguments, broken="nothing", meanwhile=None, **settings):
        asked = tmp_path / "asked.txt"
        asked.write_text("")
        environment = os.environ | {
            "PATH": f"{stub.parent}:{os.environ['PATH']}",
            "ASKED": str(asked),
            "BROKEN": broken,
            **settings,
        }
        command = [str(SCRIPT), *map(str, arguments)]
        if meanwhile is not None:
            with subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
            ) as own:
                meanwhile(own)
            return own, asked.read_text().splitlines()
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return ran, asked.read_text().splitlines()

    return run


def test_every_file_that_runs_on_a_gpu_is_run(session, tmp_path):
    marked = {path.stem for path in (ROOT / "tests" / "kernels").glob("test_*.py") if "mark.gpu" in path.read_text()}
    marked.discard(Path(__file__).stem)
    ran, asked = session(tmp_path / "out", "tests")
    assert ran.returncode == 0, ran.stderr
    assert {re.search(r"kernels/(\w+)\.py$", line)[1] for line in asked} == marked
    assert all(line.startswith("-m pytest -m gpu ") for line in asked)
    assert "test_repack: 3 passed" in ran.stdout
    assert (tmp_path / "out" / "test_int4_moe.txt").read_text() == "3 passed\n"


def test_a_failure_is_told_and_the_rest_runs(session, tmp_path):
    ran, asked = session(tmp_path / "out", "tests", "bench", broken="test_mla_decode")
    assert ran.returncode == 1
    assert f"tests failed; see {tmp_path / 'out'}" in ran.stderr
    assert [line.split()[-1] for line in asked[-6:]] == ["moe", "dense", "mla", "store", "tags", "requantize"]
    assert "bench failed" not in ran.stderr
    ran, asked = session(tmp_path / "out", "bench", broken="dense")
    assert ran.returncode == 1
    assert "an error of scripts/bench_kernels.py --only requantize" in ran.stderr
    assert len(asked) == 6


def test_the_tuner_has_a_budget(session, tmp_path):
    ran, asked = session(tmp_path / "out", "tune", broken="tune_kernels")
    assert ran.returncode == 1
    assert asked == ["scripts/tune_kernels.py --budget 540"]


def test_without_a_gpu_nothing_is_run(session, tmp_path):
    ran, asked = session(tmp_path / "out", "tests", GPU_STATUS="1")
    assert (ran.returncode, asked) == (1, [])
    assert "torch sees no GPU\nnothing was run; QUANTKIT_WITHOUT_GPU=1 runs the tests" in ran.stderr
    ran, asked = session(tmp_path / "out", "bench", GPU_STATUS="1", QUANTKIT_WITHOUT_GPU="1")
    assert (ran.returncode, len(asked)) == (0, 6)


def test_a_tuner_that_found_nothing_is_no_error_of_copying(session, tmp_path):
    ran, _ = session(tmp_path / "out", "tune", broken="tune_kernels")
    assert "cp:" not in ran.stderr


def test_a_session_that_is_ended_leaves_nothing_running(session, tmp_path):
    children = tmp_path / "children.txt"
    ended = []

    def end(process):
        while not children.exists() or not children.read_text().endswith("\n"):
            time.sleep(0.05)
        process.terminate()
        ended.append(process.wait(timeout=20))

    session(tmp_path / "out", "tune", meanwhile=end, SLOW=str(children))
    assert ended == [143]
    assert_ends(children)


def test_a_step_ends_with_its_time(session, tmp_path):
    children = tmp_path / "children.txt"
    ran, _ = session(tmp_path / "out", "tests", SLOW=str(children), QUANTKIT_STEP_SECONDS="1")
    assert ran.returncode == 1
    assert "tests failed" in ran.stderr
    assert_ends(children)


def assert_ends(children):
    """Each process whose number is in the file."""
    deadline = time.monotonic() + 10
    while (alive := [one for one in children.read_text().split() if is_alive(one)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive == []


def is_alive(process):
    status = Path(f"/proc/{process}/stat")
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_it_does_not_know_is_refused(session, tmp_path):
    usage = "scripts/gpu_session FOLDER [tests|bench|tune ...]     all three if none is named\n"
    ran, _ = session()
    assert (ran.returncode, ran.stderr) == (2, usage)
    for option, code in (("--help", 0), ("-h", 0), ("--all", 2)):
        ran, asked = session(option)
        assert (ran.returncode, ran.stdout + ran.stderr, asked) == (code, usage, [])
    ran, asked = session(tmp_path / "out", "tests", "benches")
    assert (ran.returncode, asked) == (2, [])
    assert "benches is none of tests, bench, tune" in ran.stderr
    (tmp_path / "file").write_text("")
    ran, asked = session(tmp_path / "file", "tests")
    assert (ran.returncode, asked) == (2, [])
    assert f"{tmp_path / 'file'} is no folder to write to" in ran.stderr
