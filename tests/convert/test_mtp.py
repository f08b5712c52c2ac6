"""What becomes of the draft layer: names and entries that both engines find, counts, and what never changes."""

import json
import re

import pytest
import torch

from quantkit.errors import RecipeError
from quantkit.recipe_files import recipes_directory
from tests.cli.test_commands import document, run
from tests.convert.helpers import convert
from tests.convert.test_rest_fp8 import tensors_of

DRAFT = "model.layers.2."
ALWAYS = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight", "shared_head.head.weight")


@pytest.mark.parametrize(
    ("model_type", "mtp", "rest"),
    [
        ("glm_moe_dsa", "int4", "fp8"),
        ("glm_moe_dsa", "bf16", "fp8"),
        ("glm_moe_dsa", "fp8", "fp8"),
        ("glm_moe_dsa", "fp8", "bf16"),
        ("deepseek_v3", "bf16", "bf16"),
    ],
)
def test_the_drafts_experts(model_type, mtp, rest, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type=model_type, mtp=True)
    convert(source.directory, tmp_path / "out", mtp=mtp, rest=rest)
    before, after = tensors_of(source.directory), tensors_of(tmp_path / "out")
    experts = {name for name in after if name.startswith(f"{DRAFT}mlp.experts.")}
    leaves = {name.rpartition(".")[2] for name in experts}
    dtypes = {after[name].dtype for name in experts if name.endswith(".weight")}
    assert (leaves, dtypes) == {
        "int4": ({"weight_packed", "weight_scale", "weight_shape"}, set()),
        "bf16": ({"weight"}, {torch.bfloat16}),
        "fp8": ({"weight", "weight_scale"}, {torch.float8_e4m3fn}),
    }[mtp]
    assert any(name.endswith("weight_packed") for name in after if name.startswith("model.layers.1.mlp.experts."))
    for leaf in ALWAYS:
        assert torch.equal(after[DRAFT + leaf], before[DRAFT + leaf])

    def modules(tensors):
        return {re.sub(r"[.](weight|bias)(_\w+)?$", "", name) for name in tensors}

    assert modules(after) == modules(before)
    for engine in ("sglang", "vllm"):
        found = document(run("verify", tmp_path / "out", "--engine", engine, "--json"), "verify")["engine"]
        assert found["worst"] == "loads", found["modules"][0]
        schemes = {one["modules"]: one["scheme"] for one in found["modules"]}
        name = {"sglang": "model.decoder.mlp.experts", "vllm": f"{DRAFT}mlp.experts"}[engine]
        if mtp == "int4" and engine == "vllm":
            name = "model.layers.{1-2}.mlp.experts"
        wanted = {"int4": "INT4 in groups of 32", "bf16": "not quantized", "fp8": "FP8 per block"}[mtp]
        assert schemes[name] == wanted
    assert run("verify", tmp_path / "out", "--source", source.directory).returncode == 0


def test_a_draft_that_is_dropped_leaves_nothing_behind(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(mtp=True).directory
    report = convert(source, tmp_path / "out", mtp="drop")
    assert not [name for name in tensors_of(tmp_path / "out") if name.startswith(DRAFT)]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert any("MTP layer is left out" in warning for warning in report.plan.warnings)
    assert run("verify", tmp_path / "out", "--source", source, "--engine", "vllm").returncode == 0


def test_what_the_source_does_not_have_cannot_be_kept(tiny_checkpoint, tmp_path):
    with pytest.raises(RecipeError, match="--mtp bf16: the source has no MTP layer"):
        convert(tiny_checkpoint().directory, tmp_path / "out", mtp="bf16")
    plain = tiny_checkpoint("plain", source_format="bf16", mtp=True)
    with pytest.raises(RecipeError, match="is not FP8 in the source, so not --mtp fp8"):
        convert(plain.directory, tmp_path / "out", mtp="fp8")


@pytest.mark.parametrize("mtp", ["bf16", "fp8"])
def test_glm_5_2_by_its_config_alone(mtp):
    """256 experts of the draft are one entry of the config, and both engines find it."""
    config = recipes_directory() / "configs" / "glm-5.2.json"
    found = document(
        run("plan", "--config", config, "--recipe", "glm-5.2", "--mtp", mtp, "--rest", "fp8", "--json"), "plan"
    )
    assert [one["worst"] for one in found["engines"]] == ["loads", "loads"]
