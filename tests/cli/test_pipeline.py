"""scripts/ci as a team copies it: the shell form end to end, with retries and failures; the YAML forms that call it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from quantkit.cli.app import INTERRUPTED, TERMINATED
from quantkit.cli.render import BROKEN_PIPE
from quantkit.convert.journal import read_journals
from quantkit.errors import QuantkitError, ResourceError, SourceError, UsageError, VerificationError
from tests.cli.test_commands import document, run
from tests.convert.helpers import convert, directory_bytes

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "scripts" / "ci"
SCRIPT = FOLDER / "convert-pipeline.sh"
# `quantkit` on the PATH; a file named `kill` beside it holds after how many shards the whole job is killed, and how;
# where there is one named `full`, so is the disk
PROGRAM = """#!{python}
import os, sys
from pathlib import Path
from quantkit.convert.journal import Journal
order = Path(__file__).with_name("kill")
if order.exists():
    wanted, number, original, made = *map(int, order.read_text().split()), Journal.add_output, []
    def add_output(*arguments):
        original(*arguments)
        made.append(arguments)
        if len(made) == wanted:
            order.unlink()
            os.killpg(0, number) if number == 9 else os.kill(os.getppid(), number)
            import time
            time.sleep(1)  # the signal comes by way of the script
    Journal.add_output = add_output
if Path(__file__).with_name("full").exists():
    from quantkit.convert import conversion
    conversion.free_bytes = lambda _: 1000
with Path(__file__).with_name("calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
from quantkit.cli.app import main
main()
"""


class Pipeline:
    """The script in a folder of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        (self.bin / "quantkit").write_text(PROGRAM.format(python=sys.executable))
        (self.bin / "quantkit").chmod(0o755)
        self.summary = folder / "summary.md"

    def start(self, *arguments, **settings):
        environment = {name: value for name, value in os.environ.items() if name != "GITHUB_STEP_SUMMARY"}
        environment |= {"PATH": f"{self.bin}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", "CI": "true"}
        environment |= {"QUANTKIT_TP": "1", "QUANTKIT_SUMMARY": str(self.summary), "QUANTKIT_JOBS": "1"}
        return subprocess.Popen(
            [SCRIPT, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**environment, **settings},
            start_new_session=True,
        )

    def run(self, *arguments, **settings):
        process = self.start(*arguments, **settings)
        stdout, stderr = process.communicate(timeout=300)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def kill_after(self, num_shards, number):
        (self.bin / "kill").write_text(f"{num_shards} {int(number)}")

    def calls(self):
        """Commands since the last look."""
        path = self.bin / "calls"
        text = path.read_text() if path.exists() else ""
        path.unlink(missing_ok=True)
        return [line.split()[0] for line in text.splitlines()]


@pytest.fixture
def pipeline(tmp_path):
    return Pipeline(tmp_path)


def steps(result):
    return [line.removeprefix("pipeline: ") for line in result.stderr.splitlines() if line.startswith("pipeline: ")]


def headlines(pipeline):
    return re.findall(r"^## quantkit (.*)", pipeline.summary.read_text(), re.MULTILINE)


def test_the_whole_way_and_again(pipeline, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(mtp=True).directory
    result = pipeline.run(source, "out")
    assert result.returncode == 0, result.stderr
    assert steps(result) == [
        f"plan {source}",
        f"memory-plan of {source} as INT4",
        f"convert {source} to out",
        "verify out",
        "memory-plan of out",
        "done: out",
    ]
    assert headlines(pipeline) == ["plan: ok", "memory-plan: ok", "convert: ok", "verify: ok", "memory-plan: ok"]
    assert "every value" in pipeline.summary.read_text()
    assert pipeline.calls() == ["plan", "memory-plan", "convert", "verify", "memory-plan"]
    for stream in (result.stdout, result.stderr):  # a log, and no terminal
        assert "\r" not in stream
        assert "\x1b" not in stream
        assert max(map(len, stream.splitlines())) < 300
    convert(source, tmp_path / "golden")
    made = directory_bytes(tmp_path / "out")
    assert made == directory_bytes(tmp_path / "golden")

    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = pipeline.run(source, "out/")
    assert again.returncode == 0, again.stderr
    assert "out: is complete already, and an output of this very command" in again.stdout
    assert pipeline.calls() == ["plan", "memory-plan", "convert", "verify", "memory-plan"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times


def test_a_retry_after_a_kill_goes_on(pipeline, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(num_shards=4).directory
    pipeline.kill_after(2, signal.SIGKILL)
    assert pipeline.run(source, "out").returncode == -signal.SIGKILL
    partial = tmp_path / "out.partial"
    assert not (tmp_path / "out").exists()
    finished = read_journals(partial / ".quantkit").outputs
    assert len(finished) == 2
    times = {name: (partial / name).stat().st_mtime_ns for name in finished}
    result = pipeline.run(source, "out")
    assert result.returncode == 0, result.stderr
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in finished} == times
    assert not partial.exists()
    convert(source, tmp_path / "golden")
    assert directory_bytes(tmp_path / "out") == directory_bytes(tmp_path / "golden")


@pytest.mark.parametrize("mark", [".quantkit", ".quantkit.done"])
def test_a_kill_behind_the_rename_is_mended(mark, pipeline, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    convert(source, tmp_path / "out")
    golden = directory_bytes(tmp_path / "out")
    (tmp_path / "out" / mark).mkdir()  # what is no output goes last of all
    (tmp_path / "out" / mark / "run.json").write_text("{}")
    result = pipeline.run(source, "out")
    assert result.returncode == 0, result.stderr
    assert "convert" in pipeline.calls()
    assert directory_bytes(tmp_path / "out") == golden


@pytest.mark.parametrize(("number", "returncode"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_script_stops_the_step_and_keeps_its_work(number, returncode, pipeline, tiny_checkpoint):
    source = tiny_checkpoint(num_shards=4).directory
    pipeline.kill_after(1, number)
    started = time.monotonic()
    result = pipeline.run(source, "out")
    assert result.returncode == returncode, result.stderr
    assert time.monotonic() - started < 60
    assert "shards are done and kept in out.partial" in result.stderr
    assert steps(result)[-1] == f"failed with exit code {returncode}: convert {source} to out"
    assert headlines(pipeline)[-1] == "convert: error"
    assert pipeline.run(source, "out").returncode == 0


def test_what_does_not_fit_fails_before_anything_is_converted(pipeline, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    settings = {"QUANTKIT_CONTEXT": "512", "QUANTKIT_CONCURRENCY": "100000000", "QUANTKIT_ENGINE": "vllm"}
    result = pipeline.run(source, "out", **settings)
    assert result.returncode == 5
    assert pipeline.calls() == ["plan", "memory-plan"]
    assert headlines(pipeline) == ["plan: ok", "memory-plan: failed"]
    why = pipeline.summary.read_text().partition("memory-plan: failed")[2]
    assert why.startswith("\n\n**does not fit**: ")
    assert "Asked for: 100,000,000 x 512 tokens; the pool holds " in why
    assert "Why:\n\n- " in why
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("context", [512, 10_000_000])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_without_a_context_a_modest_one_must_fit(engine, context, pipeline, tiny_checkpoint):
    """Of a small model no more than it has, and of one for ten million tokens no such request."""
    source = tiny_checkpoint(config_changes={"max_position_embeddings": context}).directory
    result = pipeline.run(source, "out", QUANTKIT_ENGINE=engine, QUANTKIT_CONCURRENCY="64", QUANTKIT_SMOKE_SHARDS="1")
    assert result.returncode == 0, result.stderr
    assert f"64 x {min(context, 32768):,} " in result.stdout


def test_a_disk_without_room_fails_at_once(pipeline, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    (pipeline.bin / "full").touch()
    result = pipeline.run(source, "out")
    assert result.returncode == 5, result.stderr
    assert pipeline.calls() == ["plan"]
    assert "**ResourceError**: the output needs " in pipeline.summary.read_text()
    assert "**Remedy**: free space" in pipeline.summary.read_text()
    assert not (tmp_path / "out.partial").exists()


def test_shards_that_are_made_need_no_room_again(pipeline, tiny_checkpoint, tmp_path, monkeypatch):
    from quantkit.cli import planning
    from quantkit.convert import conversion

    source = tiny_checkpoint(num_shards=4).directory
    pipeline.kill_after(3, signal.SIGKILL)
    pipeline.run(source, "out")
    resolved, plan = planning.plan_request(planning.PlanRequest(source=str(source)))
    there = {path.name: path.stat().st_size for path in (tmp_path / "out.partial").glob("*.safetensors")}
    assert len(there) == 4  # three, and one that is half made: its room will be free
    needed = conversion.disk_bytes(plan) - sum(there.values())
    monkeypatch.setattr(conversion, "free_bytes", lambda _: needed)
    planning.check_room(resolved, plan, tmp_path / "out", spool_bytes=1 << 30)
    monkeypatch.setattr(conversion, "free_bytes", lambda _: needed - 1)
    with pytest.raises(ResourceError, match="the output needs"):
        planning.check_room(resolved, plan, tmp_path / "out", spool_bytes=1 << 30)
    with pytest.raises(ResourceError, match="the output needs"):
        planning.check_room(resolved, plan, tmp_path / "other", spool_bytes=1 << 30)


def test_other_failures_keep_their_exit_codes(pipeline, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.remove("model.layers.1.mlp.experts.2.up_proj.weight_scale_inv")
    source.write()
    result = pipeline.run(source.directory, "out")
    assert result.returncode == 3
    assert headlines(pipeline) == ["plan: error"]
    assert steps(result)[-1] == f"failed with exit code 3: plan {source.directory}"
    assert pipeline.run("./nowhere", "out").returncode == 3
    for arguments in ([], ["one"], ["one", "two", "three"], ["", "out"], ["one", ""]):
        assert pipeline.run(*arguments).returncode == 2
    good = tiny_checkpoint("good").directory
    (tmp_path / "there").mkdir()
    assert pipeline.run(good, "there").returncode == 2
    assert pipeline.run(good, "out", QUANTKIT_TP="3").returncode == 2  # four heads
    assert pipeline.run(good, "out", QUANTKIT_SUMMARY=str(tmp_path)).returncode == 2
    assert not (tmp_path / "out").exists()
    convert(good, tmp_path / "out")
    shard = tmp_path / "out" / "model-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    result = pipeline.run(good, "out")
    assert result.returncode == 4
    assert headlines(pipeline)[-1] == "verify: failed"
    assert "memory-plan of out" not in steps(result)


def test_a_smoke_run_is_never_taken_for_a_whole_one(pipeline, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    smoke = {"QUANTKIT_SMOKE_SHARDS": "1"}
    refused = pipeline.run(source, "smoke", QUANTKIT_PUSH_TO="org/name", **smoke)
    assert refused.returncode == 2
    assert pipeline.calls() == []
    for _ in range(2):
        result = pipeline.run(source, "smoke", **smoke)
        assert result.returncode == 0, result.stderr
    assert "- partial: 1 of 2 shards" in pipeline.summary.read_text()
    assert json.loads((tmp_path / "smoke" / "conversion.json").read_text())["partial"]["limit_shards"] == 1
    result = pipeline.run(source, "smoke")
    assert result.returncode == 2
    assert "exists already, and was made with another part of it" in result.stderr
    before = directory_bytes(tmp_path / "smoke")
    result = pipeline.run(source, "smoke", QUANTKIT_SMOKE_SHARDS="2")
    assert result.returncode == 2
    assert "exists already, and was made with another part of it" in result.stderr
    assert directory_bytes(tmp_path / "smoke") == before
    convert(source, tmp_path / "whole")
    result = pipeline.run(source, "whole", **smoke)
    assert result.returncode == 2
    assert "exists already, and was made with another part of it" in result.stderr


def test_a_smoke_run_by_layers_is_none_by_shards(pipeline, tiny_checkpoint):
    source = tiny_checkpoint().directory
    made = run("convert", source, "-o", pipeline.folder / "out", "--limit-shards", "1", "--layers", "0-0")
    assert made.returncode == 0, made.stderr
    result = pipeline.run(source, "out", QUANTKIT_SMOKE_SHARDS="1")
    assert result.returncode == 2
    assert "exists already, and was made with another part of it" in result.stderr


@pytest.mark.parametrize("change", ["source", "recipe", "version"])
def test_an_output_of_something_else_is_not_taken_for_this_one(change, pipeline, tiny_checkpoint, tmp_path):
    """A job whose SOURCE was changed, and whose OUTPUT was not."""
    source = tiny_checkpoint().directory
    made_of = tiny_checkpoint("other", seed=1).directory if change == "source" else source
    convert(made_of, tmp_path / "out", **({"group_size": 64} if change == "recipe" else {}))
    if change == "version":
        manifest = json.loads((tmp_path / "out" / "conversion.json").read_text())
        manifest["tool"]["version"] = "0.0.1"
        (tmp_path / "out" / "conversion.json").write_text(json.dumps(manifest))
    before = directory_bytes(tmp_path / "out")
    result = pipeline.run(source, "out")
    assert result.returncode == 2
    assert "exists already, and was made" in result.stderr
    assert directory_bytes(tmp_path / "out") == before


def test_an_output_with_a_dash_before_it_is_a_name(pipeline, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    result = pipeline.run(source, "-out1")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "-out1" / "conversion.json").is_file()
    result = pipeline.run("-source", "out2")
    assert result.returncode == 2
    assert "SOURCE -source reads like an option" in steps(result)[-1]
    assert pipeline.calls()[-1] != "out2"


@pytest.mark.parametrize("number", ["0", "-1", "01", "two", "1 2", "*"])
def test_a_number_of_smoke_shards_is_one(number, pipeline, tiny_checkpoint):
    source = tiny_checkpoint().directory
    result = pipeline.run(source, "out", QUANTKIT_SMOKE_SHARDS=number)
    assert result.returncode == 2
    assert steps(result) == [f"QUANTKIT_SMOKE_SHARDS is {number}: give a number of shards, from 1"]


def test_a_path_is_never_read_as_shell_text(pipeline, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint("a b;$(touch x)`touch y`").directory
    result = pipeline.run(source, "o *$(touch z)", QUANTKIT_SMOKE_SHARDS="1", QUANTKIT_GPU="$(touch v)")
    assert result.returncode == 2  # no such GPU
    assert pipeline.run(source, "o *$(touch z)", QUANTKIT_SMOKE_SHARDS="1").returncode == 0
    assert (tmp_path / "o *$(touch z)" / "conversion.json").is_file()
    assert not {"v", "x", "y", "z"} & {path.name for path in tmp_path.iterdir()}


def test_the_github_workflow_calls_the_script():
    workflow = yaml.safe_load((FOLDER / "github-actions.yml").read_text())
    assert set(workflow[True]["workflow_dispatch"]["inputs"]) == {"source", "smoke_shards", "push_to"}  # `on` is True
    job = workflow["jobs"]["convert"]
    (command,) = [step["run"] for step in job["steps"] if "run" in step]
    assert command == 'scripts/ci/convert-pipeline.sh "$SOURCE" "$OUTPUT"'
    assert (ROOT / command.split()[0]).is_file()
    assert "run_attempt" not in json.dumps(workflow)
    check_settings(job["env"])


def test_the_gitlab_job_calls_the_script():
    job = yaml.safe_load((FOLDER / "gitlab-ci.yml").read_text())["convert"]
    assert job["script"] == ['scripts/ci/convert-pipeline.sh "$QUANTKIT_SOURCE" "$QUANTKIT_OUTPUT"']
    assert job["artifacts"] == {"when": "always", "paths": [job["variables"]["QUANTKIT_SUMMARY"]]}
    assert job["retry"]["exit_codes"] == [128 + signal.SIGKILL, TERMINATED]
    check_settings(job["variables"])


def test_the_settings_to_copy_suit_small_models_too(pipeline, tiny_checkpoint):
    source = tiny_checkpoint().directory
    github = yaml.safe_load((FOLDER / "github-actions.yml").read_text())["jobs"]["convert"]["env"]
    gitlab = yaml.safe_load((FOLDER / "gitlab-ci.yml").read_text())["convert"]["variables"]
    for number, variables in enumerate((github, gitlab)):
        names = ("QUANTKIT_GPU", "QUANTKIT_ENGINE", "QUANTKIT_CONTEXT", "QUANTKIT_CONCURRENCY")
        settings = {name: variables[name] for name in names if name in variables}
        result = pipeline.run(source, f"out{number}", QUANTKIT_SMOKE_SHARDS="1", **settings)
        assert result.returncode == 0, result.stderr


def check_settings(variables):
    """Every setting is one that the script knows, and text, as an environment wants it."""
    known = SCRIPT.read_text()
    for name, value in variables.items():
        assert isinstance(value, str), name
        if name.startswith("QUANTKIT_") and name != "QUANTKIT_OUTPUT":
            assert f"${{{name}:-" in known, name


def test_files_to_copy_name_nobody():
    for path in FOLDER.iterdir():
        text = path.read_text()
        assert text.isascii()
        assert not re.findall(r"[\w-]+\.(?:com|org|net|io|dev|ai|cloud)\b", text), path
    assert os.access(SCRIPT, os.X_OK)


def test_exit_codes_and_documents_go_together(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    convert(source, tmp_path / "out")
    convert(source, tmp_path / "bad")
    (tmp_path / "bad" / "config.json").unlink()
    big = ("memory-plan", "glm-5.2", "--tp", "1")
    expected = [
        (("plan", source), 0, "ok"),
        (("verify", tmp_path / "out"), 0, "ok"),
        (("verify", tmp_path / "bad"), 4, "failed"),
        (big, 5, "failed"),
        ((*big, "--allow-overcommit"), 0, "ok"),
        (("convert", source, "-o", tmp_path / "out"), 2, "error"),
        (("plan", tmp_path / "nowhere"), 3, "error"),
        (("verify", source), 4, "error"),
        (("plan", source, "-o", tmp_path / "new", "--jobs", "1000000"), 5, "error"),
    ]
    for arguments, returncode, status in expected:
        result = run(*arguments, "--json")
        parsed = json.loads(result.stdout)
        assert list(parsed)[:3] == ["command", "version", "status"]
        assert (result.returncode, parsed["status"], parsed["command"]) == (returncode, status, arguments[0])
        if status == "error":
            document(result, "error")
        assert run(*arguments).returncode == returncode


def test_the_readme_lists_every_exit_code():
    section = (ROOT / "README.md").read_text().partition("\n## In a pipeline\n")[2].partition("\n## ")[0]
    listed = [int(code) for row in re.findall(r"^\| ([\d, ]+) \|", section, re.MULTILINE) for code in row.split(",")]
    raised = {error.exit_code for error in (QuantkitError, UsageError, SourceError, VerificationError, ResourceError)}
    assert sorted(listed) == sorted({0, INTERRUPTED, BROKEN_PIPE, TERMINATED} | raised)
    for name in set(re.findall(r"`(QUANTKIT_\w+)`", section)) | set(
        re.findall(r"# +(QUANTKIT_\w+)", SCRIPT.read_text())
    ):
        assert name in section, name
        assert f"${{{name}:-" in SCRIPT.read_text(), name
