"""FP8 activations for the same tensors, native FP8 beside INT4, and the settings that follow from either."""

import json

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig

from quantkit.errors import RecipeError
from quantkit.recipe import builtin_recipe, default_recipe, override, parse_recipe, recipe_document
from tests.cli.test_commands import document, run
from tests.convert.helpers import convert, load_output, same
from tests.convert.plans import plan_of

ACTIVATIONS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def shards_of(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors"))}


def section_of(directory):
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def test_activations_change_the_config_and_nothing_else(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(mtp=True).directory
    convert(source, tmp_path / "plain", group_size=128, signed_scales=False)
    convert(source, tmp_path / "w4a8", activations="fp8-dynamic")
    assert shards_of(tmp_path / "plain") == shards_of(tmp_path / "w4a8")
    plain, w4a8 = (section_of(tmp_path / name) for name in ("plain", "w4a8"))
    assert w4a8["config_groups"]["group_0"].pop("input_activations") == ACTIVATIONS
    assert plain["config_groups"]["group_0"].pop("input_activations") is None
    assert plain == w4a8
    QuantizationConfig.model_validate(section_of(tmp_path / "w4a8"))
    sglang = run("verify", tmp_path / "w4a8", "--source", source, "--engine", "sglang")
    assert sglang.returncode == 0, sglang.stdout
    assert "W4A8" in sglang.stdout
    deepep = run("verify", tmp_path / "w4a8", "--engine", "sglang", "--tp", "1", "--backend", "deepep")
    assert deepep.returncode == 4


def test_vllm_wants_whole_tiles_of_256(tiny_checkpoint, tmp_path):
    """Experts 128 wide are refused at TP1 already; hidden 256 alone is not enough."""
    convert(tiny_checkpoint().directory, tmp_path / "w4a8", activations="fp8-dynamic")
    found = document(run("verify", tmp_path / "w4a8", "--engine", "vllm", "--tp", "1", "--json"), "verify")
    assert found["engine"]["worst"] == "refused"
    assert any("needs a multiple of 256 columns" in one["message"] for one in found["findings"])


def test_native_linears_are_the_sources_byte_for_byte(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(mtp=True)
    convert(source.directory, tmp_path / "out", rest="fp8-native", engine="sglang")
    after = load_output(tmp_path / "out")
    kept = [name for name, one in after.items() if one.dtype == torch.float8_e4m3fn]
    leaves = {name.split(".")[-2] for name in kept}
    assert leaves == {
        *("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj", "wq_b"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    for name in kept:
        assert same(after[name].view(torch.uint8), source.tensor(name).view(torch.uint8))
        scale = name.replace(".weight", ".weight_scale_inv")
        assert same(after[scale], source.tensor(scale))
    assert after["model.layers.0.self_attn.indexer.wk.weight"].dtype == torch.bfloat16
    section = section_of(tmp_path / "out")
    assert section["linear_fp8_config"]["weight_block_size"] == [128, 128]
    assert list(section["config_groups"]) == ["group_0"]
    assert run("verify", tmp_path / "out", "--source", source.directory, "--engine", "sglang").returncode == 0
    assert run("verify", tmp_path / "out", "--engine", "vllm").returncode == 4
    assert "native FP8" in (tmp_path / "out" / "README.md").read_text()


def test_a_linear_that_is_no_fp8_cannot_be_native(tiny_checkpoint):
    source = tiny_checkpoint()
    name = "model.layers.0.self_attn.kv_b_proj"
    source.remove(f"{name}.weight_scale_inv")
    source.put(f"{name}.weight", source.decoded[f"{name}.weight"].to(torch.bfloat16))
    source.write()
    for changes in ({"layout": "w4afp8"}, {"rest": "fp8-native"}):
        with pytest.raises(RecipeError, match="SGLang makes every Linear that") as caught:
            plan_of(source.directory, **changes)
        assert caught.value.tensor == f"{name}.weight"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"layout": "w4afp8"}, {"group_size": 128, "signed_scales": False, "rest": "fp8"}),
        ({"activations": "fp8-dynamic"}, {"group_size": 128, "signed_scales": False, "rest": "bf16"}),
        ({"activations": "fp8-dynamic", "rest": "fp8"}, {"group_size": 128, "signed_scales": False, "rest": "fp8"}),
        ({"zero_points": True}, {"group_size": 32, "signed_scales": False, "rest": "bf16"}),
    ],
)
def test_settings_that_follow_from_others(given, expected):
    recipe = override(default_recipe("glm_moe_dsa", has_experts=True), **given)
    assert {key: getattr(recipe, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"layout": "w4afp8", "group_size": 32}, "give --group-size 128"),
        ({"layout": "w4afp8", "signed_scales": True}, "give --positive-scales"),
        ({"layout": "w4afp8", "rest": "bf16"}, "give --rest fp8 or fp8-native"),
        ({"layout": "w4afp8", "mtp": "bf16"}, "give --mtp int4 or drop"),
        ({"layout": "w4afp8", "mtp": "fp8"}, "give --mtp int4 or drop"),
        ({"layout": "w4afp8", "zero_points": True}, "leave --zero-points out"),
        ({"layout": "w4afp8", "activations": "fp8-dynamic"}, "leave --activations out"),
        ({"activations": "fp8-dynamic", "group_size": 64}, "give --group-size 128"),
        ({"activations": "fp8-dynamic", "zero_points": True}, "leave --zero-points out"),
        ({"zero_points": True, "signed_scales": True}, "give --positive-scales"),
        ({"rest": "fp8-native", "mtp": "fp8"}, "give --mtp int4 or bf16 or drop"),
        ({"layout": "w4a8fp8"}, "choose compressed-tensors or w4afp8"),
    ],
)
def test_settings_that_do_not_go_together(given, remedy):
    with pytest.raises(RecipeError) as caught:
        override(default_recipe("glm_moe_dsa", has_experts=True), **given)
    assert caught.value.remedy == remedy


@pytest.mark.parametrize(
    ("given", "engine", "engines"),
    [
        ({"layout": "w4afp8"}, None, {"sglang"}),
        ({"rest": "fp8-native"}, None, {"sglang"}),
        ({"zero_points": True}, None, {"vllm"}),
        ({"activations": "fp8-dynamic"}, None, {"sglang", "vllm"}),
        ({"zero_points": True}, "sglang", {"sglang"}),  # which the contract then refuses
    ],
)
def test_a_form_of_one_engine_is_for_that(given, engine, engines):
    recipe = override(builtin_recipe("glm-5.2"), engine=engine, **given)
    assert set(recipe.engines) == engines
    assert all(recipe.engines.values())
    of_no_recipe = override(default_recipe("glm_moe_dsa", has_experts=True), engine=engine, **given)
    assert set(of_no_recipe.engines) == (engines if len(engines) == 1 else set())


def test_a_recipe_file_is_told_of_its_keys():
    document = recipe_document(builtin_recipe("glm-5.2")) | {"layout": "w4afp8"}
    with pytest.raises(RecipeError) as caught:
        parse_recipe(document, where="mine.yaml")
    assert str(caught.value) == "mine.yaml: layout w4afp8 does not go with group_size 32; set group_size to 128"


@pytest.mark.parametrize(
    ("changes", "engines"),
    [({"layout": "w4afp8"}, {"sglang"}), ({"rest": "fp8-native"}, {"sglang"}), ({"zero_points": True}, {"vllm"})],
)
def test_the_card_names_the_engine_that_loads_it_and_no_other(changes, engines, tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint().directory, tmp_path / "out", **changes)
    card = (tmp_path / "out" / "README.md").read_text()
    assert {one for one in ("sglang", "vllm") if f"{one} serve" in card or f"{one}.launch_server" in card} == engines
    assert "no tensor parallel size" not in card
    assert ("library_name" in card) == (changes != {"layout": "w4afp8"})


def test_forms_of_different_engines_do_not_go_together():
    with pytest.raises(RecipeError, match="are of different engines"):
        override(default_recipe("glm_moe_dsa", has_experts=True), rest="fp8-native", zero_points=True)


def test_a_refusal_says_which_option_to_leave_out(tiny_checkpoint):
    source = tiny_checkpoint().directory
    for options, words in (
        (("--rest", "fp8-native", "--engine", "vllm"), "leave --rest fp8-native out, or serve it with sglang"),
        (("--zero-points", "--engine", "sglang"), "leave --zero-points out, or serve it with vllm"),
    ):
        refused = run("plan", source, *options)
        assert refused.returncode == 4
        assert words in refused.stderr


def test_fp8_experts_of_a_draft_do_not_decide_how_the_rest_is_split(tiny_checkpoint):
    source = tiny_checkpoint(mtp=True).directory
    found = {}
    for mtp in ("int4", "fp8"):
        plan = document(run("plan", source, "--mtp", mtp, "--json"), "plan")
        found[mtp] = [(one["tp"], one["engine"], one["status"]) for one in plan["tensor_parallel"]]
    assert found["int4"] == found["fp8"]


def test_sizes_are_those_of_the_engine_that_is_meant(tiny_checkpoint):
    plan = document(run("plan", tiny_checkpoint().directory, "--rest", "fp8-native", "--json"), "plan")
    assert {one["engine"] for one in plan["tensor_parallel"]} == {"sglang"}
