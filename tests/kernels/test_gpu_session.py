"""The script for a machine with a GPU, with a python that only says what it was asked for."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "gpu_session"


@pytest.fixture
def session(tmp_path):
    stub = tmp_path / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\necho "$@" >> "$ASKED"\necho "3 passed"\ncase "$*" in *$BROKEN*) exit 1;; esac\n')
    stub.chmod(0o755)

    def run(*arguments, broken="nothing"):
        asked = tmp_path / "asked.txt"
        asked.write_text("")
        environment = os.environ | {
            "PATH": f"{stub.parent}:{os.environ['PATH']}",
            "ASKED": str(asked),
            "BROKEN": broken,
        }
        command = [str(SCRIPT), *map(str, arguments)]
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
    assert [line.split()[-1] for line in asked[-5:]] == ["moe", "dense", "mla", "store", "requantize"]
    assert "bench failed" not in ran.stderr
    ran, asked = session(tmp_path / "out", "bench", broken="dense")
    assert ran.returncode == 1
    assert len(asked) == 5


def test_the_tuner_has_a_budget(session, tmp_path):
    ran, asked = session(tmp_path / "out", "tune", broken="tune_kernels")
    assert ran.returncode == 1
    assert asked == ["scripts/tune_kernels.py --budget 540"]


def test_what_it_does_not_know_is_refused(session, tmp_path):
    assert session()[0].stderr == "scripts/gpu_session FOLDER [tests|bench|tune ...]     all three if none is named\n"
    ran, asked = session(tmp_path / "out", "benches")
    assert (ran.returncode, asked) == (2, [])
    assert "benches is none of tests, bench, tune" in ran.stderr
