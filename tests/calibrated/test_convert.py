"""`quantkit convert --method gptq|awq` as a user runs it, with the real llm-compressor; and what it refuses."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.source import open_checkpoint
from quantkit.verify.verify import verify_output
from tests.calibrated.helpers import save_tokens, tiny_glm
from tests.cli.inside import refusal, run_inside
from tests.cli.test_commands import SCHEMAS, run
from tests.convert.faults import Faults, die_before, die_in_the_middle, killed
from tests.convert.helpers import directory_bytes, load_output
from tests.streaming.models import lively_checkpoint
from tests.test_transformers import log_probabilities

OURS = ("warning: ", "quantkit: ", "convert: ", "hash the output: ", "verify")
EXPERT = "model.layers.1.mlp.experts.3"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_glm(tmp_path_factory.mktemp("glm"))


def convert(source, tmp_path, *options):
    tokens = save_tokens(tmp_path / "tokens.safetensors")
    return run("convert", source, "--to", "int4", "-o", tmp_path / "out", "--tokens", tokens, "--json", *options)


def refused(source, tmp_path, *options):
    tokens = save_tokens(tmp_path / "tokens.safetensors")
    error = refusal("convert", source, "--to", "int4", "-o", tmp_path / "out", "--tokens", tokens, *options)
    assert error.exit_code == 2
    return error


def decoded(tensors, module, group_size=32):
    """By compressed-tensors itself."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    shape = torch.Size(tensors[f"{module}.weight_shape"].tolist())
    codes = unpack_from_int32(tensors[f"{module}.weight_packed"], 4, shape)
    scale = tensors[f"{module}.weight_scale"].float().repeat_interleave(group_size, dim=1)
    return codes.float() * scale


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_gptq_of_llm_compressor_becomes_an_output_like_any_other(source, tmp_path):
    (tmp_path / "out.partial").write_text("in the way")
    stopped = convert(source, tmp_path, "--method", "gptq")
    assert stopped.returncode == 2, stopped.stderr
    words = tmp_path / "out.words" / "words.safetensors"
    made = words.stat().st_mtime_ns, words.read_bytes()
    assert "group_size was 32 and is 64" in refused(source, tmp_path, "--method", "gptq", "--group-size", "64").message
    assert (words.stat().st_mtime_ns, words.read_bytes()) == made
    (tmp_path / "out.partial").unlink()
    result = convert(source, tmp_path, "--method", "gptq")  # with the words that are there
    assert result.returncode == 0, result.stderr
    assert not [line for line in stopped.stderr.splitlines() if not line.startswith(OURS)]
    assert "warning: llm-compressor: MoE is being linearized" in stopped.stderr
    assert "llm-compressor" not in result.stderr
    jsonschema.validate(json.loads(result.stdout), json.loads((SCHEMAS / "convert.json").read_text()))
    output = tmp_path / "out"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "tokens.safetensors"}
    manifest = json.loads((output / "conversion.json").read_text())
    assert manifest["recipe"]["method"] == manifest["calibration"]["method"] == "gptq"
    assert manifest["recipe"]["calibration"]["sequences"] == 8
    assert manifest["calibration"]["num_calibrated"] == 2 * 8 * 3
    report = verify_output(output, source=open_checkpoint(source), num_jobs=2)
    assert report.is_good, report.findings
    # no rounding to nearest, whatever the scale: errors of columns were made good in others
    tensors, exact = load_output(output), load_file(source.parent / "decoded" / "model.safetensors")
    weight = exact[f"{EXPERT}.up_proj.weight"]
    scale = tensors[f"{EXPERT}.up_proj.weight_scale"].float().repeat_interleave(32, dim=1)
    assert ((decoded(tensors, f"{EXPERT}.up_proj") - weight).abs() > 0.55 * scale.abs()).float().mean() > 0.05
    tokens = load_file(tmp_path / "tokens.safetensors")["input_ids"]
    reference, got = (log_probabilities(one, tokens) for one in (source.parent / "decoded", output))
    assert 1e-6 < (reference.exp() * (reference - got)).sum(-1).mean().item() < 0.01


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_awq_moves_numbers_between_up_and_down_and_nothing_else(source, tmp_path):
    result = convert(source, tmp_path, "--method", "awq")
    assert result.returncode == 0, result.stderr
    output = tmp_path / "out"
    tensors, exact = load_output(output), load_file(source.parent / "decoded" / "model.safetensors")
    up, down = (exact[f"{EXPERT}.{leaf}.weight"] for leaf in ("up_proj", "down_proj"))
    new_up, new_down = (decoded(tensors, f"{EXPERT}.{leaf}") for leaf in ("up_proj", "down_proj"))
    divided = (new_up * up).sum(1) / (up * up).sum(1)
    multiplied = (new_down * down).sum(0) / (down * down).sum(0)
    assert (divided.max() / divided.min()) > 1.1  # something was moved
    assert (divided * multiplied - 1).abs().max() < 0.1  # and what one lost the other has
    assert (new_up - divided[:, None] * up).norm() / (divided[:, None] * up).norm() < 0.1
    for name, tensor in tensors.items():
        if "experts." not in name or "shared" in name:
            assert tensor.float().equal(exact[name].to(tensor.dtype).float()), name
    report = verify_output(output, source=open_checkpoint(source), num_jobs=2)
    assert report.is_good, report.findings
    recorded = json.loads((output / "conversion.json").read_text())["errors"]["routed_expert"]
    assert report.classes[0].relative == recorded["relative_error"] < 0.1


@pytest.mark.slow
def test_streaming_needs_no_other_library_and_leaves_nothing_behind(source, tmp_path):
    result = convert(source, tmp_path, "--method", "gptq", "--streaming", "--quiet")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert {path.name for path in tmp_path.iterdir()} == {"out", "tokens.safetensors"}
    manifest = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert manifest["calibration"]["by"] == "quantkit"
    total, experts = json.loads(result.stdout)["warnings"]
    assert total.startswith("384 tokens are few: --method gptq wants 1,024 of this model")
    assert experts.startswith("16 of 16 experts saw fewer than 256 tokens (channels of their widest input; 0 none, ")
    told = json.loads(result.stdout)["calibration"]
    assert (told["method"], told["by"], told["num_calibrated"], told["num_searched"]) == ("gptq", "quantkit", 48, 0)
    assert told["tokens"]["sha256"] == manifest["recipe"]["calibration"]["tokens"]
    jsonschema.validate(json.loads(result.stdout), json.loads((SCHEMAS / "convert.json").read_text()))
    assert manifest["calibration"]["num_calibrated"] == 2 * 8 * 3
    assert manifest["recipe"]["calibration"]["streaming"] is True
    report = verify_output(tmp_path / "out", source=open_checkpoint(source), num_jobs=2)
    assert report.is_good, report.findings
    assert (load_output(tmp_path / "out")[f"{EXPERT}.up_proj.weight_scale"] < 0).any()
    options = ["--method", "gptq", "--streaming", "--accept-complete", "--quiet"]
    tokens = ["--tokens", tmp_path / "tokens.safetensors"]
    assert run_inside("convert", source, "--to", "int4", "-o", tmp_path / "out", *tokens, *options) == 0
    assert "recipe" in refused(source, tmp_path, *options, "--sequences", "4").message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "gptq"], "--text or from --tokens"),
        (["--text", "x"], "the search sees no inputs"),
        (["--tokens", "x"], "add --method gptq or awq, or leave --tokens out"),
        (["--streaming"], "add --method gptq or awq, or leave --streaming out"),
        (["--method", "awq", "--streaming", "--text", "x"], "does not run layer by layer"),
        (["--method", "gptq", "--text", "x", "--zero-points"], "makes no zero points"),
        (["--method", "gptq", "--text", "x", "--scales", "absmax"], "chooses its own scales"),
        (["--method", "gptq", "--text", "x", "--rank", "0", "--world-size", "2"], "in one process"),
        (["--method", "gptq", "--text", "x", "--layers", "0-1"], "for all layers alike"),
        (["--method", "rtn"], "--method rtn is not there"),
        (["--method", "awq", "--text", "x", "--targets", "re:.*self_attn.o_proj"], "needs up_proj and down_proj"),
    ],
)
def test_what_does_not_go_with_a_method_is_refused_before_anything_runs(options, message, tiny_checkpoint, tmp_path):
    error = refusal("convert", tiny_checkpoint().directory, "--to", "int4", "-o", tmp_path / "out", *options)
    assert error.exit_code == 2
    assert message in str(error)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("switches", "options", "message", "remedy"),
    [
        ({"source_format": "int4_native"}, [], "the source is INT4 already", "quantkit relayout"),
        (
            {"mtp": True},
            ["--targets", r"re:.*layers\.2\..*experts.*"],
            "no weight of the layers that are run",
            "--targets",
        ),
    ],
)
def test_a_method_that_has_nothing_to_quantize_is_refused(
    method, switches, options, message, remedy, tiny_checkpoint, tmp_path
):
    """Without a method the former is copied, the latter searched."""
    directory = tiny_checkpoint(**switches).directory
    more = ["--ignore", r"re:.*layers\.1\..*"] if options else []
    for command in (["plan", directory], ["convert", directory, "-o", tmp_path / "out", "--text", "x"]):
        error = refusal(*command, "--to", "int4", "--method", method, *options, *more)
        assert (error.exit_code, message in error.message, remedy in error.remedy) == (2, True, True)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_what_is_not_installed_is_said_before_anything_runs(tiny_checkpoint, tmp_path):
    """In an environment that has all of this one but llm-compressor."""
    packages = Path(find_spec("llmcompressor").origin).parent.parent
    (tmp_path / "packages").mkdir()
    for path in packages.iterdir():
        if not path.name.startswith("llmcompressor"):
            (tmp_path / "packages" / path.name).symlink_to(path)
    program = "from quantkit.cli.app import main; main()"
    (text := tmp_path / "x").write_text("prose")
    command = ["convert", tiny_checkpoint().directory, "-o", tmp_path / "out", "--method", "awq", "--text", text]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path / 'packages'}"}
    result = subprocess.run(
        [sys.executable, "-S", "-c", program, *command], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2, result.stderr
    assert "running a model needs llmcompressor" in result.stderr
    assert "pip install '.[calibrate]'" in result.stderr
    assert not (tmp_path / "out.words").exists()


def test_a_directory_that_is_not_ours_is_left_alone(tiny_checkpoint, tmp_path):
    (tmp_path / "out.words").mkdir()
    (tmp_path / "out.words" / "mine").touch()
    ids = torch.zeros(2, 8, dtype=torch.int64)
    save_file({"input_ids": ids}, tmp_path / "tokens.safetensors")
    options = ["-o", tmp_path / "out", "--method", "gptq", "--tokens", tmp_path / "tokens.safetensors"]
    error = refusal("convert", tiny_checkpoint().directory, "--to", "int4", *options)
    assert (error.exit_code, error.message) == (2, "is there and not ours")
    assert (tmp_path / "out.words" / "mine").exists()


@pytest.fixture(scope="module")
def words_of_a_stopped_run(tmp_path_factory):
    """A directory with tokens and the words of a conversion that was refused behind its calibration; and its source."""
    source = lively_checkpoint(tmp_path_factory.mktemp("lively") / "source", "glm_moe_dsa").directory
    stopped = tmp_path_factory.mktemp("stopped")
    save_file({"input_ids": torch.arange(96).view(4, 24)}, stopped / "tokens.safetensors")
    (stopped / "out.partial").write_text("in the way")
    assert refusal(*streamed(source, stopped)).exit_code == 2
    (stopped / "out.partial").unlink()
    return source, stopped


def streamed(source, root, *options):
    tokens = ["--tokens", root / "tokens.safetensors"]
    return (
        "convert",
        source,
        "--to",
        "int4",
        "-o",
        root / "out",
        "--method",
        "gptq",
        "--streaming",
        "-q",
        *tokens,
        *options,
    )


@pytest.mark.slow
def test_a_kill_behind_the_rename_leaves_words_that_the_next_command_removes(words_of_a_stopped_run, tmp_path):
    """At every change from the rename of the output on that is one of words; no child runs the model."""
    source, stopped = words_of_a_stopped_run

    def prepared(name):
        shutil.copytree(stopped, tmp_path / name)
        return tmp_path / name

    faults = Faults(prepared("whole"), removals=True)
    with faults.injected(die_before, -1):
        run_inside(*streamed(source, faults.root))
    renamed = next(at for at, call in enumerate(faults.calls) if call == f"rename {faults.root / 'out.partial'}")
    places = [renamed, *(at for at, call in enumerate(faults.calls) if at > renamed and ".words" in call)]
    assert len(places) == 1 + 2 + 1 + 3 + 1  # layers, what experts saw, documents, directory
    for at in places:
        root = prepared(f"kill-{at}")
        command = streamed(source, root)
        assert killed(lambda: run_inside(*command), Faults(root, removals=True), die_in_the_middle, at)  # noqa: B023
        assert refusal(*command).message == "exists already"
        assert {path.name for path in root.iterdir()} == {"out", "tokens.safetensors"}
        assert directory_bytes(root / "out") == directory_bytes(faults.root / "out")
    assert run_inside(*streamed(source, root, "--accept-complete")) == 0


def test_words_that_were_damaged_since_are_refused(words_of_a_stopped_run, tmp_path):
    source, stopped = words_of_a_stopped_run
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "out.words" / "layer-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    error = refusal(*streamed(source, tmp_path))
    assert (error.exit_code, error.file, error.message) == (3, str(path), "is not what it was when it was made")
    assert "--no-resume" in error.remedy
    assert not (tmp_path / "out").exists()


def test_words_of_another_output_are_left_alone(words_of_a_stopped_run, tmp_path):
    source, stopped = words_of_a_stopped_run
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    before = directory_bytes(tmp_path / "out.words")
    assert run_inside("convert", source, "--to", "int4", "-o", tmp_path / "out", "-q") == 0
    for document in ({}, {"calibration": {"words_sha256": "0" * 64}}, {"calibration": []}):
        manifest = json.loads((tmp_path / "out" / "conversion.json").read_text())
        (tmp_path / "out" / "conversion.json").write_text(json.dumps(manifest | document))
        assert refusal(*streamed(source, tmp_path)).message == "exists already"
        assert directory_bytes(tmp_path / "out.words") == before


@pytest.mark.parametrize(
    ("model_type", "options", "words"),
    [
        ("glm4_moe_lite", ["--streaming"], "'glm4_moe_lite' cannot be run layer by layer"),
        ("kimi_k2", [], "transformers does not load it"),  # without code of the checkpoint
    ],
)
def test_a_model_that_cannot_be_run_is_refused_before_anything_is_made(
    model_type, options, words, tiny_checkpoint, tmp_path, monkeypatch
):
    source = tiny_checkpoint(model_type=model_type).directory
    save_file({"input_ids": torch.zeros(2, 8, dtype=torch.int64)}, tmp_path / "tokens.safetensors")
    monkeypatch.setattr("quantkit.calibrated.make.run_directory", lambda *_, **__: pytest.fail("it has begun"))
    arguments = ["--tokens", tmp_path / "tokens.safetensors", "--method", "gptq", *options]
    error = refusal("convert", source, "--to", "int4", "-o", tmp_path / "new" / "out", *arguments)
    assert (error.exit_code, words in error.message) == (3, True), str(error)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "tokens.safetensors"}


def test_an_output_that_exists_is_refused_before_anything_is_calibrated(words_of_a_stopped_run, tmp_path, monkeypatch):
    """Also under the name that is taken where none is given."""
    source, stopped = words_of_a_stopped_run
    (tmp_path / "source-int4").mkdir()
    monkeypatch.chdir(tmp_path)
    tokens = ["--tokens", stopped / "tokens.safetensors"]
    error = refusal("convert", source, "--to", "int4", "--method", "gptq", "--streaming", *tokens)
    assert (error.exit_code, error.message) == (2, "exists already")
    assert [path.name for path in tmp_path.iterdir()] == ["source-int4"]
