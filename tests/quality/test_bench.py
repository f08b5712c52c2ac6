"""The harness that compares methods runs, quantizes what it says, and tells what it found."""

import json
import re
import sys

import pytest
import torch

from quantkit.families import FAMILIES
from scripts import bench_quality, quality_methods
from scripts.fp8_blocks import read_int4
from scripts.quality_figures import Reference
from scripts.quality_llmcompressor import int4_of
from scripts.quality_methods import METHODS, QUANTKIT, TARGETS
from tests.cli.inside import run_inside

GPTQ = "GPTQ"
OURS = [name for name in METHODS if "llm-compressor" not in name and name != GPTQ]
LINEARS = ("glm_moe_dsa", "linears")
FIGURES = {"kl", "kl_standard_error", "p99", "same_top", "perplexity_ratio", "weight_error", "kl_of_windows"}


@pytest.fixture
def quantized(monkeypatch):
    """Modules that each output has in INT4, by its name. Commands run in this process, by the same command line."""
    found, compare = {}, Reference.compare

    def run(command):
        assert command[0] == QUANTKIT
        assert run_inside(*command[1:]) == 0

    def watched(reference, output):
        found[output.name] = {name.removesuffix(".weight") for name in read_int4(output)}
        return compare(reference, output)

    monkeypatch.setattr(quality_methods, "_run", run)
    monkeypatch.setattr(Reference, "compare", watched)
    return found


def bench(monkeypatch, source, path, *options):
    arguments = [str(source), "--group-size", "32", "--windows", "2", "--threads", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench_quality", *arguments, *options])
    bench_quality.main()
    return json.loads(path.read_text())


def named_by(targets, names):
    """As compressed-tensors reads them."""
    patterns = [target.removeprefix("re:") for target in targets]
    named = {pattern: {name for name in names if re.match(pattern, name)} for pattern in patterns}
    assert all(named.values()), "a pattern names nothing"
    return set.union(*named.values())


@pytest.mark.slow
def test_every_method_of_ours_quantizes_what_the_targets_say(trained, tmp_path, quantized, monkeypatch, capsys):
    (document,) = bench(monkeypatch, trained, tmp_path / "f.json", "--scope", "linears", "--methods", *OURS)
    names = {name.removesuffix(".weight") for name in Reference.of(trained, 1).weights}
    expected = named_by(TARGETS[LINEARS], names)
    assert {"model.layers.0.mlp.up_proj", "model.layers.3.mlp.experts.15.down_proj"} < expected
    assert {name: modules ^ expected for name, modules in quantized.items() if modules != expected} == {}
    assert len(quantized) == len(OURS)
    assert {key: document[key] for key in ("source", "model_type", "scope", "group_size")} == {
        "source": "glm-tiny",
        "model_type": "glm_moe_dsa",
        "scope": "linears",
        "group_size": 32,
    }
    assert list(document["methods"]) == OURS
    for row in document["methods"].values():
        assert row.keys() == FIGURES
        assert 0 < row["kl"] < 0.1
        assert 0.05 < row["weight_error"] < 0.15
        assert len(row["kl_of_windows"]) == 2
    assert document["kl_ratios"].keys() == {"search / absmax", "search + importance / search"}
    errors = {name: row["weight_error"] for name, row in document["methods"].items()}
    assert errors["search"] == min(errors.values()) < errors["absmax"]
    assert "| search + importance | " in capsys.readouterr().out


@pytest.mark.slow
def test_gptq_quantizes_what_the_targets_say(trained, tmp_path, quantized, monkeypatch):
    """Of the attention alone: 200 weights of experts would take half a minute."""
    monkeypatch.setitem(TARGETS, LINEARS, TARGETS[LINEARS][-1:])
    options = ["--scope", "linears", "--methods", "search", GPTQ]
    (document,) = bench(monkeypatch, trained, tmp_path / "f.json", *options)
    names = {name.removesuffix(".weight") for name in Reference.of(trained, 1).weights}
    assert list(quantized.values()) == 2 * [named_by(TARGETS[LINEARS], names)]
    errors = {name: row["weight_error"] for name, row in document["methods"].items()}
    assert errors["search"] < errors[GPTQ] < 2 * errors["search"]  # it rounds for the outputs


@pytest.mark.slow
def test_the_scope_of_experts_is_what_recipes_quantize(trained, tmp_path, quantized, monkeypatch):
    (document,) = bench(monkeypatch, trained, tmp_path / "f.json", "--scope", "experts", "--methods", "absmax")
    names = {name.removesuffix(".weight") for name in Reference.of(trained, 1).weights}
    experts = {name for name in names if FAMILIES["glm_moe_dsa"].role_of(f"{name}.weight") == "routed_expert"}
    assert list(quantized.values()) == [experts] == [named_by(TARGETS["glm_moe_dsa", "experts"], names)]
    assert document["kl_ratios"] == {}


def test_a_weight_of_llm_compressor_off_its_grid_ends_the_comparison():
    linear = torch.nn.Linear(64, 4, bias=False)
    codes = torch.arange(256).reshape(4, 64) % 16 - 8
    linear.weight_scale = torch.nn.Parameter(torch.rand(4, 2) + 0.5)
    linear.weight.data = codes * linear.weight_scale.repeat_interleave(32, dim=1).data
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    stored = int4_of(linear)
    assert torch.equal(unpack_from_int32(stored["weight_packed"], 4, torch.Size([4, 64])), codes.to(torch.int8))
    linear.weight.data[2, 5] += 0.02 * linear.weight_scale[2, 0]
    with pytest.raises(SystemExit, match="off the grid"):
        int4_of(linear)
