"""`quantkit calibrate` in real processes: documents, errors, an interrupted run."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from quantkit.statistics.file import open_statistics
from tests.cli.inside import refusal, run_inside
from tests.cli.test_commands import document, run
from tests.streaming.models import lively_checkpoint


@pytest.fixture
def source(tmp_path):
    return lively_checkpoint(tmp_path / "source", "glm_moe_dsa").directory


def tokens(tmp_path, ids=None):
    path = tmp_path / "tokens.safetensors"
    save_file({"input_ids": torch.arange(64).view(4, 16) if ids is None else ids}, path)
    return path


def calibrated(*arguments):
    run_inside("calibrate", *arguments, "-q")


def test_the_document_says_what_the_file_holds(source, tmp_path):
    result = run("calibrate", source, "--tokens", tokens(tmp_path), "-o", tmp_path / "s.safetensors", "--json")
    assert result.returncode == 0, result.stderr
    found = document(result, "calibrate")
    statistics = open_statistics(tmp_path / "s.safetensors")
    assert found["model"] == statistics.model
    assert found["tokens"] == {"sha256": statistics.metadata["tokens"], "num_sequences": 4, "length": 16}
    counts = statistics.read("model.layers.1.mlp.experts.token_count")
    assert found["experts"][0]["tokens"]["most"] == counts.max()
    assert counts.sum() == 64 * 2
    assert {one["part"] for one in found["cache"]} == {"latent", "rope"}


def test_fewer_sequences_are_the_first(source, tmp_path):
    path = tokens(tmp_path)
    calibrated(source, "--tokens", path, "-o", tmp_path / "few.safetensors", "--sequences", "2")
    few = tokens(tmp_path, torch.arange(32).view(2, 16))
    calibrated(source, "--tokens", few, "-o", tmp_path / "same.safetensors")
    assert (tmp_path / "few.safetensors").read_bytes() == (tmp_path / "same.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.full((2, 8), 128), "holds token 128 at [0, 0], the vocabulary has 128"),
        (torch.full((2, 8), -1), "holds token -1"),
        (torch.zeros(2, 8, dtype=torch.int32), "store it as I64 [sequences, length]"),
        (torch.zeros(8, dtype=torch.int64), "store it as I64 [sequences, length]"),
        (torch.zeros(0, 8, dtype=torch.int64), "holds 0 sequences"),
        (torch.zeros(3, 1, dtype=torch.int64), "holds 3 sequences of 1 tokens"),
    ],
)
def test_token_files_that_cannot_be_meant_are_refused(source, tmp_path, ids, message):
    error = refusal("calibrate", source, "--tokens", tokens(tmp_path, ids), "-o", tmp_path / "s.safetensors")
    assert error.exit_code == 3
    assert message in str(error)
    assert not list(tmp_path.glob("s.safetensors*"))


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([], 2),
        (["--text", "TEXT", "--tokens", "TOKENS"], 2),
        (["--tokens", "TOKENS", "--length", "8"], 2),
        (["--tokens", "TOKENS", "--dtype", "float16"], 2),
        (["--tokens", "TOKENS", "--device", "cuda:7"], 2),
        (["--tokens", "TOKENS", "--device", "nonsense"], 2),
        (["--text", "TEXT"], 3),  # no tokenizer beside the model
        (["--text", "nowhere"], 3),
        (["--tokens", "nowhere"], 3),
    ],
)
def test_errors_have_a_code_and_a_remedy(source, tmp_path, options, code):
    (tmp_path / "text.txt").write_text("a few words")
    places = {"TEXT": tmp_path / "text.txt", "TOKENS": tokens(tmp_path)}
    arguments = [places.get(one, one) for one in options]
    error = refusal("calibrate", source, "-o", tmp_path / "s.safetensors", *arguments)
    assert error.exit_code == code
    assert error.remedy
    assert not list(tmp_path.glob("s.safetensors*"))


def test_an_architecture_that_is_not_known_is_refused(tmp_path):
    tiny = lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    tiny.config["model_type"] = "mamba"
    tiny.write_config()
    arguments = ["--tokens", tokens(tmp_path), "-o", tmp_path / "s.safetensors"]
    error = refusal("calibrate", tmp_path / "source", *arguments)
    assert (error.exit_code, error.file) == (3, "config.json")
    assert "supported: glm_moe_dsa" in str(error)
    assert not list(tmp_path.glob("s.safetensors*"))


def test_a_killed_run_goes_on_and_gives_the_same_bytes(source, tmp_path):
    """Killed without warning as soon as its first layer is on the disk."""
    path = tokens(tmp_path)
    whole, output = tmp_path / "whole.safetensors", tmp_path / "s.safetensors"
    calibrated(source, "--tokens", path, "-o", whole)
    command = ["calibrate", str(source), "--tokens", str(path), "-o", str(output)]
    code = "from quantkit.cli.app import main; main()"
    process = subprocess.Popen([sys.executable, "-c", code, *command], stderr=subprocess.DEVNULL)
    first = tmp_path / "s.safetensors.partial" / "layer-00000.safetensors"
    while process.poll() is None and not first.exists():
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if not output.exists():  # it may have been faster than this test
        assert first.exists()
        calibrated(*command[1:])
    assert output.read_bytes() == whole.read_bytes()


def test_a_run_killed_before_it_was_begun_is_no_obstacle(source, tmp_path):
    (tmp_path / "s.safetensors.partial").mkdir()
    (tmp_path / "s.safetensors.partial" / "begun.json.draft").write_text("{")
    calibrated(source, "--tokens", tokens(tmp_path), "-o", tmp_path / "s.safetensors")
    assert not (tmp_path / "s.safetensors.partial").exists()


@pytest.mark.parametrize(("content", "code"), [("[1]", 3), ("{", 3), ('{"model": 1}', 2)])
def test_what_an_earlier_run_says_of_itself_is_not_believed(source, tmp_path, content, code):
    partial = tmp_path / "s.safetensors.partial"
    partial.mkdir()
    (partial / "begun.json").write_text(content)
    error = refusal("calibrate", source, "--tokens", tokens(tmp_path), "-o", tmp_path / "s.safetensors")
    assert error.exit_code == code
    assert "--no-resume" in error.remedy


def test_somebody_elses_directory_or_link_is_left_alone(source, tmp_path):
    partial = tmp_path / "s.safetensors.partial"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "begun.json").write_text("{}")
    partial.symlink_to(tmp_path / "theirs")
    arguments = ["calibrate", source, "--tokens", tokens(tmp_path), "-o", tmp_path / "s.safetensors", "--no-resume"]
    assert refusal(*arguments).exit_code == 2
    assert (tmp_path / "theirs" / "begun.json").exists()


def test_statistics_do_not_go_into_the_source(source, tmp_path):
    error = refusal("calibrate", source, "--tokens", tokens(tmp_path), "-o", source / "s.safetensors")
    assert error.exit_code == 2
    assert not list(source.glob("s.*"))


def test_paths_are_looked_at_before_transformers_is_imported(tiny_checkpoint, tmp_path):
    source, there = tiny_checkpoint().directory, tmp_path / "there.safetensors"
    there.touch()
    program = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        assert name not in ('torch', 'transformers'), name\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from quantkit.cli.app import main; main()\n"
    )
    for options, code, said in (
        (["--text", tmp_path / "no.txt", "-o", tmp_path / "new"], 3, "no.txt: cannot be read (No such file)"),
        (["--text", there, "-o", there], 2, "there.safetensors: exists already"),
    ):
        command = [sys.executable, "-c", program, "calibrate", source, *options]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode, said in result.stderr) == (code, True), result.stderr
