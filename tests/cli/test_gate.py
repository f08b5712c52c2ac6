"""`quantkit gate` as a user meets it: exit codes, tables, the document, the summary, hostile names."""

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress

import pytest

from quantkit.cli.summary import summary
from tests.cli.test_commands import document, run
from tests.cli.test_summary import HOSTILE, rendered
from tests.gate.helpers import flipped, harness_log, plain_log

MAIN = "from quantkit.cli.app import main; main()"
PASSES, FAILS = (14042, 281, 281), (14042, 420, 142)


def logs(directory, **tasks):
    """Two runs of tasks, each given by questions, lost, gained."""
    for side, folder in enumerate(("fp8", "int4")):
        for task, counts in tasks.items():
            harness_log(directory / folder, task, flipped(*counts)[side])
    return directory / "fp8", directory / "int4"


@pytest.mark.parametrize(
    ("counts", "options", "code", "verdict"),
    [
        (PASSES, [], 0, "within"),
        (FAILS, [], 4, "exceeded"),
        ((1319, 26, 26), [], 4, "not shown"),
        ((1319, 26, 26), ["--point"], 0, "within"),
        ((1319, 26, 26), ["--confidence", "0.8"], 0, "within"),
        ((1319, 46, 26), ["--point"], 4, "exceeded"),
    ],
)
def test_the_gate_opens_or_not(counts, options, code, verdict, tmp_path):
    paths = logs(tmp_path, mmlu=counts)
    result = run("gate", *paths, "--max-drop", "0.8", *options, "--json")
    assert result.returncode == code, result.stderr
    assert result.stderr == ""
    made = document(result, "gate")
    assert made["status"] == ("ok" if code == 0 else "failed")
    assert made["overall"]["verdict"] == verdict
    assert result.stdout == run("gate", *paths, "--max-drop", "0.8", *options, "--json").stdout
    text = run("gate", *paths, "--max-drop", "0.8", *options)
    assert text.returncode == code
    assert ("the gate is shut" in text.stderr) == (code == 4)
    assert text.stdout.rstrip().endswith("passes" if code == 0 else "does not pass")
    assert ("to show a drop within 0.8 takes" in text.stdout) == (code == 4)


def test_the_document_says_what_was_counted(tmp_path):
    paths = logs(tmp_path, arc_easy=(2376, 50, 45), gsm8k=(1319, 28, 25))
    made = document(run("gate", *paths, "--max-drop", "0.8", "--json"), "gate")
    arc, gsm8k = made["tasks"]
    assert (arc["task"], arc["filter"], arc["metric"]) == ("arc_easy", "none", "acc")
    assert (gsm8k["num_lost"], gsm8k["num_gained"], gsm8k["num_questions"]) == (28, 25, 1319)
    assert gsm8k["change"] == pytest.approx(-100 * 3 / 1319)
    assert gsm8k["candidate"] - gsm8k["baseline"] == pytest.approx(gsm8k["change"])
    assert gsm8k["interval"][0] < gsm8k["change"] < gsm8k["interval"][1]
    assert gsm8k["drop_bound"] == -gsm8k["interval"][0]
    assert gsm8k["questions_needed"]["even_chance"] > 1319
    assert made["overall"]["change"] == pytest.approx((arc["change"] + gsm8k["change"]) / 2)
    assert made["criterion"]["mean_over"] == "tasks"
    only = document(run("gate", *paths, "--max-drop", "0.8", "--json", "--task", "gsm8k"), "gate")
    assert only["tasks"] == [gsm8k]
    assert {**only["overall"], "task": "gsm8k", "filter": "none", "metric": "acc"} == gsm8k


def test_the_table_names_tasks_and_the_mean(tmp_path):
    paths = logs(tmp_path, mmlu=PASSES, gsm8k=(1319, 26, 26))
    text = run("gate", *paths, "--max-drop", "0.8").stdout
    assert re.search(r"gsm8k +acc +1,319 .* not shown\n +mmlu +acc +14,042 .* within\n +mean of 2 tasks ", text)
    each = run("gate", *paths, "--max-drop", "0.8", "--per-task")
    assert each.returncode == 4
    assert each.stdout.endswith("1 of 2 tasks are within 0.8 points: does not pass\n")
    assert "all questions: drop 0.00" in run("gate", *paths, "--max-drop", "0.8", "--pooled").stdout


def test_everything_wrong_is_one_line_with_file_and_line(tmp_path):
    before, after = plain_log(tmp_path / "a.jsonl", [1, 0, 1]), plain_log(tmp_path / "b.jsonl", [1, 0])
    result = run("gate", before, after, "--max-drop", "0.8", "--json")
    assert result.returncode == 3
    error = document(result, "error")["error"]
    assert error["file"] == f"{before}:3"
    assert error["class"] == "SourceError"
    assert len(result.stderr.splitlines()) == 1
    allowed = run("gate", before, after, "--max-drop", "1", "--point", "--allow-unpaired")
    assert allowed.returncode == 0
    assert "warning: not compared: 1 samples of all" in allowed.stderr
    for options, code in [
        (["--max-drop", "x"], 2),
        (["--max-drop", "nan"], 2),
        (["--max-drop", "1", "--confidence", "95"], 2),
        (["--max-drop", "1", "--per-task", "--pooled"], 2),
        (["--max-drop", "1", "--task", "nosuch"], 2),
        (["--max-drop", "1", "--metric", "nosuch"], 3),
    ]:
        refused = run("gate", before, plain_log(tmp_path / "c.jsonl", [1, 0, 1]), *options)
        assert refused.returncode == code, options
        assert len(refused.stderr.splitlines()) == 1, refused.stderr


def test_names_of_others_do_no_harm(tmp_path):
    names = [name for name in HOSTILE if not re.search(r"[\ud800-\udfff]", name)]
    lines = [{"id": 0, "task": name, "correct": 1} for name in names]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (other := tmp_path / "b.jsonl").write_text(path.read_text())
    result = run("gate", path, other, "--max-drop", "99", "--summary", tmp_path / "s.md", "--json")
    made = document(result, "gate")
    assert sorted(one["task"] for one in made["tasks"]) == sorted(names)
    text = (tmp_path / "s.md").read_text()
    assert text == summary(made)
    assert set(re.findall(r"<(/?\w+)", rendered(text))) <= {
        f"{slash}{tag}"
        for slash in ("", "/")
        for tag in ("h2", "p", "strong", "code", "table", "thead", "tbody", "tr", "th", "td", "ul", "li")
    }
    assert "\x1b" not in run("gate", path, other, "--max-drop", "99").stdout


@pytest.mark.parametrize(
    ("counts", "options", "sentence"),
    [
        (PASSES, [], "at most 0.28 (95%, one-sided); the upper bound is within 0.8 points: passes"),
        ((1319, 26, 26), [], "; a drop within 0.8 points is not shown, as the upper bound is beyond: does not pass"),
        (FAILS, [], "; the drop exceeds 0.8 points: the lower bound, 1.70, does: does not pass"),
        ((1319, 46, 26), ["--point"], "; the observed drop exceeds 0.8 points: does not pass"),
        ((1319, 26, 26), ["--point"], "; the observed drop is within 0.8 points: passes"),
    ],
)
def test_the_verdict_names_what_is_beyond(counts, options, sentence, tmp_path):
    text = run("gate", *logs(tmp_path, mmlu=counts), "--max-drop", "0.8", *options)
    assert text.stdout.rstrip().endswith(sentence), text.stdout


def test_a_terminal_shows_the_verdict_once(tmp_path):
    before, after = logs(tmp_path, mmlu=FAILS)
    terminal, shown = pty.openpty()
    command = [sys.executable, "-c", MAIN, "gate", before, after, "--max-drop", "0.8"]
    with subprocess.Popen(command, stdout=shown, stderr=shown) as process:
        os.close(shown)
        text = b""
        with suppress(OSError):  # which is how a terminal ends
            while part := os.read(terminal, 1 << 16):
                text += part
    os.close(terminal)
    assert process.returncode == 4
    assert text.count(b"does not pass") == 1, text


@pytest.mark.parametrize("text", ["-1", "100", "nan"])
def test_what_is_no_number_of_points_is_refused(text, tmp_path):
    refused = run("gate", *logs(tmp_path, mmlu=(100, 1, 1)), f"--max-drop={text}")
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"quantkit: --max-drop {text} is no number of percentage points from 0 up to 100;")


def test_a_share_for_points_is_doubted(tmp_path):
    paths = logs(tmp_path, mmlu=(100, 1, 1))
    made = document(run("gate", *paths, "--max-drop", "0.008", "--json"), "gate")
    (warning,) = made["warnings"]
    assert warning.startswith("--max-drop 0.008 is in percentage points: 1 of 12,500 questions; write 0.8 if")
    for points in ("0", "0.05"):
        assert document(run("gate", *paths, "--max-drop", points, "--json"), "gate")["warnings"] == []


def test_a_log_is_not_compared_with_itself(tmp_path):
    before, _ = logs(tmp_path, mmlu=(100, 1, 1), gsm8k=(100, 1, 1))
    (file,) = before.rglob("*mmlu*.jsonl")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / file.name).symlink_to(file)
    for one, other in [(before, before), (tmp_path / "link", before)]:
        refused = run("gate", one, other, "--max-drop", "0.8")
        assert refused.returncode == 2
        assert "is a log that both sides read" in refused.stderr


@pytest.mark.parametrize(("counts", "code"), [(PASSES, 0), (FAILS, 4)])
def test_a_summary_of_either_answer(counts, code, tmp_path):
    paths = logs(tmp_path, mmlu=counts, gsm8k=counts)
    result = run("gate", *paths, "--max-drop", "0.8", "--summary", tmp_path / "s.md", "--json")
    assert result.returncode == code
    text = (tmp_path / "s.md").read_text()
    assert text == summary(document(result, "gate"))
    assert text.startswith(f"## quantkit gate: {'ok' if code == 0 else 'failed'}\n\n**mean of 2 tasks: drop ")
    assert rendered(text).count("<table>") == 1
    refused = run("gate", "nosuch", "nosuch", "--max-drop", "0.8", "--summary", tmp_path / "e.md", cwd=tmp_path)
    assert refused.returncode == 3
    assert "gate: error" in (tmp_path / "e.md").read_text()
