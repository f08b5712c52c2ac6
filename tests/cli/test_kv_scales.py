"""`quantkit kv-scales` as a user meets it: tables, the document, exit codes, what is written."""

import json
import re

import pytest
from safetensors.numpy import load_file

from tests.checkpoint.hub_server import REPOSITORY, serve
from tests.cli.inside import run_inside
from tests.cli.test_commands import document, run
from tests.kv_scales.helpers import calibrated


@pytest.fixture
def heads(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="glm4_moe").directory
    calibrated(source, tmp_path / "s.safetensors", sigmas={"k": 250.0})
    return source, tmp_path / "s.safetensors"


def test_scales_of_heads_are_written_beside_the_checkpoint(heads, tmp_path):
    source, statistics = heads
    result = run("kv-scales", source, "--stats", statistics, "--json", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    made = document(result, "kv-scales")
    assert (made["attention"], made["method"], made["is_useful"]) == ("grouped", "absmax", True)
    assert made["written"] == {"path": "source-kv-scales.safetensors", "to": "sidecar"}
    assert made["statistics"]["tokens"] == "3000"
    tensors = load_file(tmp_path / "source-kv-scales.safetensors")
    for layer in made["layers"]:
        assert tensors[f"{layer['module']}.k_scale"].tolist() == layer["k_scale"]
        assert layer["k_scale"][0] == pytest.approx(layer["parts"][0]["largest"] / 448)
    again = run("kv-scales", source, "--stats", statistics, cwd=tmp_path)
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_the_tables_name_engines_and_the_worst_layer_first(heads, tmp_path):
    source, statistics = heads
    text = run(
        "kv-scales", source, "--stats", statistics, "--method", "mse", "-o", "x.safetensors", cwd=tmp_path
    ).stdout
    assert re.search(r"sglang +fa3 +yes +ignored", text)
    assert re.search(r"vllm +FLASH_ATTN +yes +used", text)
    assert text.index("\n      1  k ") < text.index("\n      0  k ") < text.index("\n      1  v ")
    assert "relative error, mean of 2 layers: k 0." in text
    assert "\nwritten: x.safetensors\nno engine reads this file where it is: --write-to checkpoint makes a copy" in text
    assert text.endswith("to serve: vllm serve CHECKPOINT --kv-cache-dtype fp8\n")
    assert "gain nothing" not in text


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "kimi_k2"])
def test_where_scales_do_nothing_that_is_said_and_nothing_written(model_type, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type=model_type).directory
    calibrated(source, tmp_path / "s.safetensors")
    here = {path.name for path in tmp_path.iterdir()}
    result = run("kv-scales", source, "--stats", tmp_path / "s.safetensors", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "nothing is written: KV scales do nothing here, as no backend" in result.stdout
    assert "in 2 of 2 layers" in result.stdout
    assert "--kv-cache-dtype fp8_e4m3 in SGLang" in result.stdout
    assert result.stdout.endswith("--force writes them all the same\n")
    assert "the rope part has no norm" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == here
    made = document(
        run("kv-scales", source, "--stats", tmp_path / "s.safetensors", "--json", cwd=tmp_path), "kv-scales"
    )
    assert made["written"] is None
    assert {part["part"] for layer in made["layers"] for part in layer["parts"]} == {"latent", "rope"}
    assert any(row["verdict"] == "harmful" for row in made["verdicts"])
    forced = run("kv-scales", source, "--stats", tmp_path / "s.safetensors", "--force", cwd=tmp_path)
    assert "\nwritten: source-kv-scales.safetensors\n" in forced.stdout
    assert "kv_cache_scheme" not in forced.stderr  # nothing clips at 1.0
    assert "warning: these scales make attention wrong in sglang trtllm" in forced.stderr


def test_scales_that_gain_nothing_are_named_so(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="glm4_moe").directory
    calibrated(source, tmp_path / "s.safetensors", sigmas={"v": 4.0})
    told = run("kv-scales", source, "--stats", tmp_path / "s.safetensors", cwd=tmp_path)
    assert "these scales gain nothing: an FP8 KV cache loses no more at scale 1.0, which needs none" in told.stdout
    assert "kv_cache_scheme" not in told.stderr


def test_a_draft_layer_is_counted_apart(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(mtp=True).directory
    text = run("kv-scales", source, cwd=tmp_path).stdout
    assert "(DSA), 2 and 1 draft layer, names of" in text
    assert "in 3 of 3 layers, the draft among them" in text


def test_where_something_clips_the_config_is_explained(heads, tmp_path):
    source, statistics = heads
    told = run("kv-scales", source, "--stats", statistics, "-o", "x.safetensors", cwd=tmp_path).stderr
    assert "note: with kv_cache_scheme in its config both engines take an FP8 cache by themselves" in told


def test_the_proof_needs_no_data(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="kimi_k25").directory
    made = document(run("kv-scales", source, "--json", cwd=tmp_path), "kv-scales")
    assert [one["unit_scale_is_safe"] for one in made["latent_bounds"]] == [True, True]
    assert (made["method"], made["layers"], made["statistics"]) == (None, [], None)
    assert "KV scales do nothing here" in made["why_not_written"]
    heads = tiny_checkpoint("heads", model_type="glm4_moe").directory
    made = document(run("kv-scales", heads, "--force", "--json", cwd=tmp_path), "kv-scales")
    assert (made["written"], made["latent_bounds"]) == (None, [])
    assert "--method unit" in made["why_not_written"]


def test_a_copy_of_an_output_passes_verify(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="glm4_moe").directory
    assert run("convert", source, "-o", tmp_path / "int4", "-q").returncode == 0
    calibrated(source, tmp_path / "s.safetensors")  # of the source: the model is the same
    options = ["--stats", tmp_path / "s.safetensors", "--write-to", "checkpoint", "--json"]
    made = document(run("kv-scales", tmp_path / "int4", *options, cwd=tmp_path), "kv-scales")
    assert made["written"] == {"path": "int4-kv-scales", "to": "checkpoint"}
    verified = run("verify", tmp_path / "int4-kv-scales", "--source", source, "--engine", "sglang")
    assert verified.returncode == 0, verified.stderr
    assert run("card", tmp_path / "int4-kv-scales").stdout == (tmp_path / "int4-kv-scales" / "README.md").read_text()
    assert document(run("kv-scales", tmp_path / "int4-kv-scales", "--json"), "kv-scales")["stored_scales"]


def test_quiet_leaves_the_progress_out(tiny_checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_inside("convert", tiny_checkpoint(model_type="glm4_moe").directory, "-o", "int4", "-q")
    told = []
    for options in ([], ["-q"]):
        capsys.readouterr()
        run_inside("kv-scales", "int4", "--method", "unit", "--write-to", "checkpoint", "-o", f"o{len(told)}", *options)
        told.append(["MB/s" in line for line in capsys.readouterr().err.splitlines()])
    assert any(told[0])
    assert not any(told[1])


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--method", "best"], 2, "choose absmax, percentile, mse, unit"),
        (["--method", "mse"], 2, "needs statistics"),
        (["--method", "percentile", "--percentile", "101"], 2, "--percentile 101"),
        (["--per", "channel"], 2, "choose tensor, head"),
        (["--format", "gguf"], 2, "choose compressed-tensors"),
        (["--format", "sglang", "--method", "unit"], 2, "give --tp N"),
        (["--tp", "8"], 2, "--tp is of --format sglang"),
        (["--format", "sglang", "--tp", "8", "--write-to", "checkpoint"], 2, "is a file beside"),
        (["--write-to", "nowhere"], 2, "choose sidecar, checkpoint"),
        (["--write-to", "checkpoint", "--method", "unit"], 2, "is no output of quantkit"),
        (["--stats", "nosuch.safetensors"], 3, "nosuch.safetensors"),
        (["--stats", "SOURCE/model-00001-of-00002.safetensors"], 3, "is no statistics file"),
        (["--stats", "OTHER"], 3, "was made from another model"),
    ],
)
def test_everything_wrong_is_one_line(options, code, words, heads, tiny_checkpoint, tmp_path):
    source, _ = heads
    other = tiny_checkpoint("other", model_type="glm4_moe", seed=5).directory
    calibrated(other, tmp_path / "other.safetensors")
    here = {path.name for path in tmp_path.iterdir()}
    names = {"OTHER": tmp_path / "other.safetensors", "SOURCE": source}
    replaced = [str(names.get(one, one)).replace("SOURCE", str(source)) for one in options]
    result = run("kv-scales", source, *replaced, "--json", cwd=tmp_path)
    assert result.returncode == code, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert words in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == here
    assert document(result, "error")["error"]["remedy"]


def test_of_a_hub_repository_kilobytes_are_read(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="glm_moe_dsa")
    with serve(source.directory) as (handler, endpoint):
        environment = {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "x",
        }
        far = run("kv-scales", REPOSITORY, "--json", env=environment)
        assert far.returncode == 0, far.stderr
        ranges = [one.headers.get("range", "") for one in handler.requests if one.name.endswith(".safetensors")]
        assert all(ranges)
    near = run("kv-scales", source.directory, "--json")
    one, other = (document(result, "kv-scales") for result in (far, near))
    assert one["latent_bounds"] == other["latent_bounds"]
    assert len(one["latent_bounds"]) == 2


def test_the_document_is_the_same_every_time(heads, tmp_path):
    source, statistics = heads
    texts = []
    for _ in range(2):
        result = run(
            "kv-scales", source, "--stats", statistics, "--method", "mse", "-o", "y.safetensors", "--json", cwd=tmp_path
        )
        texts.append(json.loads(result.stdout))
        (tmp_path / "y.safetensors").unlink()
    assert texts[0] == texts[1]
