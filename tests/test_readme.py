"""The README's quickstart runs, its commands are all there, and the package that it installs is whole."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from quantkit.cli.app import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
def test_quickstart_runs_as_the_readme_says(tmp_path):
    assert "```sh\nscripts/quickstart\n```" in README
    result = subprocess.run(
        [ROOT / "scripts" / "quickstart", tmp_path / "q"], capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stderr
    for words in ("$ quantkit plan", "verified and in place", "good (", "# INT4 of a local checkpoint"):
        assert words in result.stdout
    assert (tmp_path / "q" / "glm-5.2-int4" / "conversion.json").is_file()


@pytest.mark.slow
def test_the_walk_with_a_small_model_runs_as_printed(tmp_path):
    (walk,) = re.findall(r"```sh\n(scripts/train_tiny_glm.py .*?)```", README, re.DOTALL)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    program = Path(sys.executable).parent  # quantkit lies beside it, where it is installed
    shell = f'quantkit() {{ "{sys.executable}" -c "from quantkit.cli.app import main; main()" "$@"; }}\n'
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", shell + walk],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{program}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr
    assert "KL divergence" in result.stdout
    assert (tmp_path / "glm-tiny.html").is_file()


def test_every_command_is_in_the_readme():
    commands = [command.name for command in app.registered_commands]
    assert len(commands) >= 5
    for command in commands:
        assert f"quantkit {command}" in README, command


def test_files_and_options_that_the_readme_names_exist():
    for name in set(re.findall(r"`((?:scripts|quantkit|tests|recipes)/[\w./-]*)`", README)):
        assert (ROOT / name).exists(), name
    help_texts = (ROOT / "tests" / "golden" / "options.json").read_text()
    for option in set(re.findall(r"`(--[a-z-]+)", README)):
        assert f'"{option}"' in help_texts or option == "--help", option


def test_wheel_holds_both_packages_recipes_and_schemas(tmp_path, monkeypatch):
    from hatchling.build import build_wheel

    monkeypatch.chdir(ROOT)
    with zipfile.ZipFile(tmp_path / build_wheel(str(tmp_path))) as wheel:
        names = set(wheel.namelist())
    for name in (
        "quantkit/cli/app.py",
        "quantkit/cli/schemas/plan.json",
        "quantkit/_recipes/glm-5.2.yaml",
        "quantkit/py.typed",
        "quantkit_kernels/__init__.py",
        "quantkit_kernels/py.typed",
    ):
        assert name in names, name
    assert not [name for name in names if name.startswith(("tests", "scripts", "kernels"))]


def test_the_example_of_a_file_of_tokens_runs(tmp_path, monkeypatch):
    """With a tokenizer for which every byte is a token."""
    from transformers import PreTrainedTokenizerFast

    from quantkit.streaming import read_tokens

    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    monkeypatch.chdir(tmp_path)
    exec(PYTHON[0], {"tokenizer": PreTrainedTokenizerFast(tokenizer_object=made), "text": "abcde" * 1000})
    tokens = read_tokens(tmp_path / "ids.safetensors", vocabulary=256)
    assert tokens.ids_NS.shape == (2, 2048)
    assert tokens.ids_NS[0, :6].tolist() == [alphabet[letter] for letter in "abcdea"]


@pytest.mark.slow
def test_the_python_examples_run(tmp_path, monkeypatch):
    """On a tiny checkpoint, and on a CPU."""
    from quantkit_kernels import reference
    from tests.convert.helpers import convert
    from tests.kernels.compare import assert_close
    from tests.kernels.int4_weights import random_int4
    from tests.tiny import write_checkpoint

    source = write_checkpoint(tmp_path / "source")
    convert(source.directory, tmp_path / "glm-5.2-int4")
    monkeypatch.chdir(tmp_path)
    _, whole_model, weight_alone = PYTHON
    names: dict[str, object] = {}
    exec(whole_model.replace('device="cuda"', 'device="cpu"'), names)
    model = names["model"]
    assert not any(tensor.is_meta for tensor in model.parameters())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    packed, scale = random_int4((70, 256), 32, device)
    x = torch.ones((3, 256), dtype=torch.bfloat16, device=device)
    names = {"weight_packed": packed, "weight_scale": scale, "x": x}
    exec(weight_alone, names)
    expected = reference.int4_gemm(x.double(), packed, scale, group_size=32)
    assert_close("README", expected, names["y"], most=2.0**-8)
