"""The command line as a user meets it: exit codes in real processes, documents against their schemas."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest

import quantkit.cli
from quantkit.cli.app import _nothing_begun
from tests.cli.command_server import run_forked
from tests.convert.helpers import leftovers

SCHEMAS = Path(quantkit.cli.__file__).parent / "schemas"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def run(*arguments, cwd=None, env=None):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})}
    return run_forked([*map(str, arguments)], cwd or Path.cwd(), environment)


def document(result, schema):
    """The one JSON document on stdout, valid against its schema."""
    parsed = json.loads(result.stdout)
    jsonschema.validate(parsed, json.loads((SCHEMAS / f"{schema}.json").read_text()))
    return parsed


def test_the_whole_way(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(mtp=True).directory
    result = run("plan", source, "--to", "int4", "--json")
    assert result.returncode == 0, result.stderr
    plan = document(result, "plan")
    assert plan == document(run("convert", source, "--to", "int4", "--dry-run", "--json"), "plan")
    assert not (tmp_path / "source-int4").exists()

    result = run("convert", source, "--to", "int4", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    converted = document(result, "convert")
    output = tmp_path / "source-int4"
    assert converted["tensor_bytes"] == plan["output"]["tensor_bytes"]
    shards = sorted(output.glob("*.safetensors"))
    assert sum(path.stat().st_size for path in shards) == plan["output"]["shard_bytes"]
    largest = max(shards, key=lambda path: path.stat().st_size)
    assert plan["output"]["largest_shard"] == {"name": largest.name, "bytes": largest.stat().st_size}
    files = [path for path in output.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= plan["needs"]["disk_bytes"]

    verified = document(run("verify", output, "--source", source, "--json"), "verify")
    assert verified["status"] == "ok"
    assert verified["errors"] == converted["errors"]
    assert len(verified["weights"]) == sum(one["num_weights"] for one in verified["errors"])
    inspected = document(run("inspect", output, "--json"), "inspect")
    assert inspected["num_bytes"] == plan["output"]["tensor_bytes"]
    card = document(run("card", output, "--json"), "card")["card"]
    assert card == run("card", output).stdout == (output / "README.md").read_text()
    before = document(run("inspect", source, "--json"), "inspect")
    assert inspected["num_parameters"] == before["num_parameters"]


def test_plain_text_names_what_matters(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    plan = run("plan", source, "--to", "int4")
    assert plan.returncode == 0
    for word in ("routed_expert", "tensors", "disk needed", "memory needed", "Tensor parallel", "glm_moe_dsa"):
        assert word in plan.stdout
    converted = run("convert", source, "-o", tmp_path / "out")
    assert "verified and in place" in converted.stdout
    assert "publish" not in converted.stdout + converted.stderr  # that is what --push-to does
    assert "convert: 100%" in converted.stderr
    assert "good" in run("verify", tmp_path / "out").stdout
    assert run("convert", source, "-o", tmp_path / "quiet", "-q").stderr == ""


@pytest.mark.parametrize(
    ("arguments", "returncode"),
    [
        ("plan nosuch", 2),
        ("convert nosuch", 2),
        ("memory-plan nosuch", 2),
        ("serve-plan nosuch", 2),
        ("kv-scales nosuch", 2),
        ("recipes nosuch", 2),
        ("verify empty --source nosuch", 2),
        ("plan glm-5.2 --recipe nosuch.yaml", 2),
        ("plan ./nosuch", 3),
        ("plan a/b/c", 3),
        ("plan empty", 3),
        ("plan --config nosuch.json", 3),
        ("convert ./nosuch", 3),
        ("convert ./nosuch -o out", 3),
        ("memory-plan ./nosuch", 3),
        ("serve-plan ./nosuch", 3),
        ("kv-scales ./nosuch", 3),
        ("kv-scales empty", 3),
        ("serve-plan empty", 3),
        ("memory-plan nosuch.json", 3),
        ("memory-plan file", 3),
        ("memory-plan glm-5.2 --check nosuch.log", 3),
        ("inspect nosuch", 3),
        ("inspect ./nosuch", 3),
        ("inspect file", 3),
        ("verify nosuch", 3),
        ("verify ./nosuch", 3),
        ("verify file", 3),
        ("verify empty --source ./nosuch", 3),
        ("card nosuch", 3),
        ("card ./nosuch", 3),
        ("card file", 3),
        ("card file/below", 3),
        ("gate nosuch file --max-drop 1", 3),
        ("gate file file --max-drop 1", 3),
        ("gate empty empty --max-drop 1", 3),
        ("verify empty", 4),
        ("card empty", 4),
    ],
)
def test_what_is_not_there_is_no_damaged_output(arguments, returncode, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    result = run(*arguments.split(), cwd=tmp_path)
    assert result.returncode == returncode, result.stderr
    assert result.stderr.startswith("quantkit: ")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "file"}


def test_a_line_says_what_goes_on_and_whose_work_it_was(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    ranked = run("convert", source, "-o", tmp_path / "out", "--rank", "0", "--world-size", "1")
    assert "convert: 100%" in ranked.stderr
    assert "completes the output" in ranked.stdout
    finalized = run("convert", source, "-o", tmp_path / "out", "--finalize")
    assert "check finished work: 100%" in finalized.stderr
    assert "convert: " not in finalized.stderr
    assert "(0 MB/s, " in finalized.stdout
    assert "of it before this run)" in finalized.stdout
    verified = run("verify", tmp_path / "out", "--source", source).stderr
    for label in ("check files", "check source", "compare with the source"):
        assert f"{label}: 100%" in verified


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["convert", "SOURCE", "--to", "int5"], 2),
        (["convert", "SOURCE", "--group-size", "48"], 2),
        (["convert", "SOURCE", "--scales", "best"], 2),
        (["convert", "SOURCE", "--recipe", "glm-5.7"], 2),
        (["convert", "SOURCE", "--recipe", "kimi-k2"], 2),
        (["convert", "SOURCE", "--targets", "re:("], 2),
        (["convert", "SOURCE", "--targets", "re:.*nothing"], 2),
        (["convert", "SOURCE", "-o", "SOURCE"], 2),
        (["convert", "SOURCE", "-o", "SOURCE/out"], 2),
        (["convert", "SOURCE", "--recipe", "TYPO.yaml"], 2),
        (["convert", "glm-5.3x"], 2),
        (["plan"], 2),
        (["convert", ""], 2),
        (["convert"], 2),
        (["convrt", "SOURCE"], 2),
        (["convert", "SOURCE", "--bogus"], 2),
        (["convert", "SOURCE", "--jobs", "none"], 2),
        (["convert", "SOURCE", "-o", "x" * 300], 2),
        (["convert", "SOURCE", "-o", "x" * 250], 2),
        (["convert", "SOURCE", "--layers", "1"], 2),
        (["convert", "SOURCE", "--layers", ""], 2),
        (["convert", "SOURCE", "--layers", "1-0"], 2),
        (["convert", "SOURCE", "--layers", "0-2"], 2),
        (["convert", "SOURCE", "--limit-shards", "0"], 2),
        (["convert", "SOURCE", "--limit-shards", "1", "--rank", "0", "--world-size", "2"], 2),
        (["convert", "SOURCE", "--layers", "0-1", "--finalize"], 2),
        (["convert", "y" * 300], 3),
        (["inspect", "y" * 300], 3),
        (["plan", "SOURCE", "--config", "SOURCE/config.json"], 2),
        (["recipes", "glm-9"], 2),
        (["convert", "./nowhere"], 3),
        (["convert", "BROKEN"], 3),
        (["plan", "BROKEN"], 3),
        (["inspect", "./nowhere"], 3),
        (["plan", "--config", "./nowhere.json"], 3),
        (["verify", "SOURCE"], 4),
        (["card", "SOURCE"], 4),
        (["card", "./nowhere"], 3),
        (["gate", "SOURCE", "SOURCE"], 2),
        (["gate", "SOURCE", "SOURCE", "--max-drop", "-1"], 2),
        (["gate", "SOURCE", "SOURCE", "--max-drop", "1"], 3),
        (["convert", "SOURCE", "--public"], 2),
        (["convert", "SOURCE", "--push-to", "name"], 2),
        (["convert", "SOURCE", "--push-to", "org/name"], 3),
        (["convert", "no-such-org/no-such-model"], 3),
        (["convert", "glm-5.2"], 3),
    ],
)
def test_errors_are_one_line_with_a_code_and_a_document(arguments, code, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    broken = tiny_checkpoint("broken", write=False)
    broken.remove(EXPERT + "_scale_inv")
    broken.write()
    (tmp_path / "TYPO.yaml").write_text("version: 1\nname: x\ngroupsize: 32\n")
    here = {path.name for path in tmp_path.iterdir()}
    words = {"SOURCE": str(source), "BROKEN": str(broken.directory), "TYPO.yaml": str(tmp_path / "TYPO.yaml")}

    def replaced(argument):
        for word, value in words.items():
            argument = argument.replace(word, value)
        return argument

    result = run(*map(replaced, arguments), cwd=tmp_path, env={"HF_HOME": str(tmp_path / ".hf")})
    assert result.returncode == code, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert {path.name for path in tmp_path.iterdir()} - {".hf"} == here
    as_json = run(*map(replaced, arguments), "--json", cwd=tmp_path, env={"HF_HOME": str(tmp_path / ".hf")})
    assert as_json.returncode == code
    error = document(as_json, "error")["error"]
    assert error["remedy"]


def test_reader_that_has_gone_away_is_no_bug(tiny_checkpoint):
    command = (
        f"{sys.executable} -c 'from quantkit.cli.app import main; main()' plan {tiny_checkpoint().directory} --json"
    )
    result = subprocess.run(
        ["bash", "-c", f"{command} | head -c 1 > /dev/null; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode in {0, 141}  # 0 where all of it fitted into the pipe
    assert result.stderr == ""


def test_unreachable_hub_is_said_with_the_remedy(tmp_path):
    environment = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    result = run("plan", "glm-5.2", env=environment)
    assert result.returncode == 3
    assert "zai-org/GLM-5.2-FP8@main" in result.stderr
    assert "network" in result.stderr


def test_damaged_output_is_code_4(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    assert run("convert", source, "-o", tmp_path / "out", "-q").returncode == 0
    path = tmp_path / "out" / "model-00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    result = run("verify", tmp_path / "out")
    assert result.returncode == 4
    assert "sha256" in result.stderr
    assert document(run("verify", tmp_path / "out", "--json"), "verify")["status"] == "failed"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_finished_work_and_nothing_else(number, code, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    # enough work to be interrupted: an unknown 2-D float tensor of 400 MB is copied
    import torch

    source.put("model.ballast", torch.zeros(100_000, 1000))
    source.write()
    for _ in range(5):
        returncode, stderr = interrupted_run(source.directory, tmp_path, number)
        if returncode != 0:
            break
        shutil.rmtree(tmp_path / "out")  # it was done before the signal came
    assert returncode == code, stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "out").exists()
    leftovers(tmp_path, {"source"})
    partial = tmp_path / "out.partial"
    kept = f"quantkit: 1 of 2 shards are done and kept in {partial}: the same command goes on from there\n"
    assert stderr.endswith(kept if partial.exists() else "quantkit: nothing was begun\n")


def test_an_interruption_says_where_nothing_was_begun(tmp_path):
    out = tmp_path / "out"
    assert _nothing_begun(["convert", "x", "-o", str(out)])
    assert _nothing_begun(["convert", "x", f"--output={out}"])
    assert not _nothing_begun(["evaluate", "x", "y"])  # what it writes is not known here
    (tmp_path / "out.words").mkdir()
    assert not _nothing_begun(["convert", "x", "-o", str(out)])


def interrupted_run(source, tmp_path, number):
    """Return code and stderr of a conversion that gets a signal once it has begun to write."""
    command = [sys.executable, "-c", "from quantkit.cli.app import main; main()"]
    process = subprocess.Popen(
        [*command, "convert", str(source), "-o", str(tmp_path / "out")], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if list((tmp_path / "out.partial").glob("*.safetensors")):
            break
        time.sleep(0.005)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr


def test_partial_directory_of_a_killed_run_is_replaced(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / ".quantkit").mkdir()
    (partial / "model-00001-of-00002.safetensors").write_bytes(b"half")
    assert run("convert", source, "-o", tmp_path / "out", "-q").returncode == 0
    assert not partial.exists()
    assert run("verify", tmp_path / "out").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["recipes"],
        ["convert", "--help"],
        ["serve-plan", "--help"],
        ["gate", "--help"],
        ["calibrate", "--help"],
        ["kv-scales", "--help"],
        ["evaluate", "--help"],
        ["--version"],
    ],
)
def test_help_and_recipes_import_nothing_heavy(arguments):
    code = (
        "import sys, atexit\n"
        "def check():\n"
        "    bad = {'torch', 'numba', 'transformers', 'numpy', 'pydantic', 'huggingface_hub'} & set(sys.modules)\n"
        "    sys.stderr.write('IMPORTED ' + str(sorted(bad)))\n"
        "atexit.register(check)\n"
        "from quantkit.cli.app import main\n"
        f"sys.argv = ['quantkit', *{arguments!r}]\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr.endswith("IMPORTED []"), result.stderr


def test_every_command_has_help_with_an_example():
    commands = [
        "convert",
        "plan",
        "verify",
        "inspect",
        "card",
        "memory-plan",
        "serve-plan",
        "calibrate",
        "kv-scales",
        "evaluate",
        "gate",
        "recipes",
    ]
    assert all(command in run("--help").stdout for command in commands)
    for command in commands:
        assert "Example: quantkit " + command in run(command, "--help").stdout


def test_options_are_frozen():
    """A change of the command line is a decision: change this list with it."""
    import re

    found = {}
    commands = (
        "convert",
        "plan",
        "verify",
        "inspect",
        "relayout",
        "card",
        "kv-scales",
        "memory-plan",
        "serve-plan",
        "calibrate",
        "evaluate",
        "gate",
        "recipes",
    )
    for command in (*commands, "kv-guard selftest", "kv-guard inspect", "kv-guard explain"):
        text = run(*command.split(), "--help", env={"COLUMNS": "200"}).stdout
        found[command] = sorted(
            set(re.findall(r"(?<=[ /])--?[a-z][a-z-]*", text.split("Options:")[1])) - {"--help", "-h"}
        )
    golden = Path(__file__).parent.parent / "golden" / "options.json"
    assert found == json.loads(golden.read_text())


def test_recipes_are_printed_as_written_and_as_a_document():
    listed = document(run("recipes", "--json"), "recipes")["recipes"]
    assert len(listed) == 12
    for name in ("glm-5.2", "kimi-k2.5"):
        assert any(one["name"] == name for one in listed)
        assert "version: 1" in run("recipes", name).stdout
        assert document(run("recipes", name, "--json"), "recipes")["recipe"]["name"] == name


def test_recipe_file_and_overrides_end_up_in_the_manifest(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    text = run("recipes", "glm-5.2").stdout.replace("name: glm-5.2", "name: mine")
    (tmp_path / "mine.yaml").write_text(text)
    options = ["--recipe", tmp_path / "mine.yaml", "--group-size", "64", "--positive-scales", "--scales", "absmax"]
    assert run("convert", source, "-o", tmp_path / "out", "-q", *options).returncode == 0
    recipe = json.loads((tmp_path / "out" / "conversion.json").read_text())["recipe"]
    assert (recipe["name"], recipe["group_size"], recipe["signed_scales"], recipe["scales"]) == (
        "mine",
        64,
        False,
        "absmax",
    )
