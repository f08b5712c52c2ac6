"""INT4 experts beside the source's own FP8 blocks: byte for byte, loadable by both engines, and by transformers."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quantkit.checkpoint.source import open_checkpoint
from quantkit.errors import SourceError
from quantkit.families import FAMILIES as KNOWN
from quantkit.recipe_files import recipes_directory
from quantkit.verify.structure import check_contract
from tests.cli.test_commands import document, run
from tests.convert.helpers import convert

FAMILIES = ["glm_moe_dsa", "glm4_moe", "deepseek_v3", "kimi_k25"]


def tensors_of(directory):
    found = {}
    for shard in directory.glob("*.safetensors"):
        found |= load_file(shard)
    return found


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_stays_in_fp8_is_the_sources_byte_for_byte(model_type, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type=model_type, mtp=model_type == "glm_moe_dsa")
    convert(source.directory, tmp_path / "out", rest="fp8")
    before, after = tensors_of(source.directory), tensors_of(tmp_path / "out")
    kept = {name.removesuffix(".weight") for name, one in after.items() if one.dtype == torch.float8_e4m3fn}
    leaves = {module.rpartition(".")[2] for module in kept}
    mla = {"q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj", "down_proj"}
    assert (
        leaves
        == {
            "glm_moe_dsa": mla | {"wq_b"},
            "glm4_moe": {"o_proj", "down_proj"},
            "deepseek_v3": mla,
            "kimi_k25": mla,
        }[model_type]
    )
    for module in kept:
        assert torch.equal(after[f"{module}.weight"].view(torch.uint8), before[f"{module}.weight"].view(torch.uint8))
        assert torch.equal(after[f"{module}.weight_scale"], before[f"{module}.weight_scale_inv"])
        assert f"{module}.weight_scale_inv" not in after
    assert not any(".experts." in module for module in kept)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    section = config.get("quantization_config") or config["text_config"]["quantization_config"]
    groups = section["config_groups"]
    assert groups["group_0"]["targets"][0] == "Linear"
    assert groups["group_1"]["weights"]["block_structure"] == [128, 128]
    assert all(entry.startswith("re:") for entry in groups["group_1"]["targets"])
    for engine in ("sglang", "vllm"):
        found = document(run("verify", tmp_path / "out", "--engine", engine, "--json"), "verify")
        assert found["engine"]["worst"] in {"loads", "needs a flag"}, found["findings"]


def test_for_vllm_alone_gate_and_up_stay_too(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    convert(source, tmp_path / "out", rest="fp8", engine="vllm")
    after = tensors_of(tmp_path / "out")
    assert after["model.layers.0.mlp.gate_proj.weight"].dtype == torch.float8_e4m3fn
    assert after["model.layers.0.self_attn.kv_b_proj.weight"].dtype == torch.bfloat16
    assert run("verify", tmp_path / "out", "--engine", "vllm").returncode == 0
    refused = run("verify", tmp_path / "out", "--engine", "sglang")
    assert refused.returncode == 4
    assert "TypeError" in refused.stdout


def test_values_are_compared_with_the_source(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(mtp=True).directory
    convert(source, tmp_path / "out", rest="fp8")
    assert run("verify", tmp_path / "out", "--source", source).returncode == 0
    assert run("plan", tmp_path / "out", "--rest", "fp8").returncode == 0  # INT4 already, and in FP8 what was


@pytest.mark.parametrize(
    ("suffix", "value", "words"),
    [("weight", 0x7F, "holds a NaN at"), ("weight_scale_inv", float("nan"), "nan, which is no scale")],
)
def test_bad_codes_and_scales_are_found_where_they_are_only_copied(suffix, value, words, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    tensor = source.tensor(f"model.layers.0.self_attn.o_proj.{suffix}")
    (tensor.view(torch.uint8) if suffix == "weight" else tensor)[0, 0] = value
    source.write()
    with pytest.raises(SourceError, match=words):
        convert(source.directory, tmp_path / "out", rest="fp8")


def test_fused_projections_stay_together(tiny_checkpoint, tmp_path):
    """Where one of two that engines fuse is BF16 in the source, so is the other in the output."""
    source = tiny_checkpoint()
    name = "model.layers.0.self_attn.q_a_proj"
    source.remove(f"{name}.weight_scale_inv")
    source.put(f"{name}.weight", source.decoded[f"{name}.weight"].to(torch.bfloat16))
    source.write()
    convert(source.directory, tmp_path / "out", rest="fp8")
    after = tensors_of(tmp_path / "out")
    assert after["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].dtype == torch.bfloat16
    assert after["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"].dtype == torch.float8_e4m3fn
    for engine in ("sglang", "vllm"):
        assert run("verify", tmp_path / "out", "--engine", engine).returncode == 0


def test_nothing_to_keep_is_said(tiny_checkpoint):
    source = tiny_checkpoint(source_format="bf16").directory
    warnings = document(run("plan", source, "--rest", "fp8", "--json"), "plan")["warnings"]
    assert "--rest fp8 keeps nothing: the source has no FP8 weights" in warnings


@torch.no_grad()
def test_transformers_loads_both_groups(tiny_checkpoint, tmp_path):
    """The real library reads the two groups and decompresses them: the logits of the same weights in BF16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = tiny_checkpoint(model_type="deepseek_v3").directory
    tokens = torch.arange(1, 20).unsqueeze(0)
    logits = []
    for rest in ("bf16", "fp8"):
        convert(source, tmp_path / rest, rest=rest)
        assert AutoConfig.from_pretrained(tmp_path / rest)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / rest, dtype=torch.bfloat16)
        logits.append(model(tokens).logits.float().numpy())
    difference = np.abs(logits[0] - logits[1]).mean() / np.abs(logits[0]).mean()
    assert difference < 0.05


def test_an_output_whose_config_forgets_fp8_is_found(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint().directory, tmp_path / "out", rest="fp8")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    groups = config["quantization_config"]["config_groups"]

    def messages():
        path.write_text(json.dumps(config))
        checkpoint = open_checkpoint(tmp_path / "out")
        return {one.message for one in check_contract(checkpoint, KNOWN["glm_moe_dsa"], allow_incomplete=False)}

    assert messages() == set()
    fp8 = groups.pop("group_1")
    assert any("declares no FP8 quantization" in message for message in messages())
    groups["group_1"] = fp8 | {"targets": [one for one in fp8["targets"] if "q_b_proj" not in one]}
    assert "is FP8, which the config does not declare" in messages()
    groups["group_1"] = fp8 | {"targets": [*fp8["targets"], r"re:.*kv_b_proj$"]}
    assert "is not FP8, but the config says so" in messages()
    groups["group_1"] = fp8 | {"targets": ["Linear"]}
    assert any("'Linear' belongs to INT4" in message for message in messages())
    groups["group_1"] = fp8
    config["quantization_config"]["ignore"].append(r"re:.*q_b_proj$")
    assert "is FP8, but the config ignores it" in messages()


def test_plan_counts_whole_blocks():
    """Of GLM-5.2: 2048 / 32 = 64 columns of the shared expert are no block."""
    config = recipes_directory() / "configs" / "glm-5.2.json"
    verdicts = {}
    for rest in ("bf16", "fp8"):
        found = document(run("plan", "--config", config, "--recipe", "glm-5.2", "--rest", rest, "--json"), "plan")
        verdicts[rest] = {one["tp"]: one["status"] for one in found["tensor_parallel"] if one["engine"] == "sglang"}
    assert (verdicts["bf16"][32], verdicts["fp8"][32]) == ("ok", "refused")
    assert verdicts["fp8"][16] == verdicts["fp8"][8] == "ok"


@pytest.mark.parametrize("rest", ["bf16", "fp8"])
def test_the_card_says_what_lies_beside_int4(rest, tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint().directory, tmp_path / "out", rest=rest)
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("FP8 blocks of 128 x 128 (`float-quantized`)" in card) == (rest == "fp8")
