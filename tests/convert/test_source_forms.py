"""Every source form gives the bytes that compressed-tensors makes of the same weights, decoded by torch."""

import json

import pytest
import torch

from quantkit.errors import RecipeError, SourceError
from tests.convert.helpers import convert, directory_bytes, load_output, oracle_int4, same
from tests.tiny import BLOCK, EXPERTS, FP8, HIDDEN, expand, quantize_fp8_blocks

FORMS = ["fp8_block", "fp8_channel", "fp8_tensor", "modelopt", "bf16", "f16", "f32"]
FAMILIES = [
    "glm_moe_dsa",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
    "deepseek_v32",
    "kimi_k2",
    "kimi_k25",
    "qwen3_moe",
]


def check_against_oracle(source, output, group_size=32):
    """Every logical weight of the source, in the output: experts as the oracle packs them, the rest decoded."""
    num_experts = 0
    for name, decoded in source.decoded.items():
        module = name.removesuffix(".weight")
        if ".mlp.experts." in name:
            packed, scale = oracle_int4(decoded, group_size)
            assert same(output[f"{module}.weight_packed"], packed), name
            assert same(output[f"{module}.weight_scale"], scale), name
            assert output[f"{module}.weight_shape"].tolist() == list(decoded.shape)
            assert output[f"{module}.weight_shape"].dtype == torch.int64
            assert name not in output
            num_experts += 1
        else:
            assert same(output[name], decoded.to(output[name].dtype)), name
    assert num_experts == 3 * EXPERTS
    assert not [name for name in output if name.endswith(("scale_inv", ".scale"))]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_oracles_bytes(form, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format=form)
    convert(source.directory, tmp_path / "out", scales="absmax")
    check_against_oracle(source, load_output(tmp_path / "out"))


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_every_family_and_group_size_gives_the_oracles_bytes(model_type, group_size, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type=model_type)
    convert(source.directory, tmp_path / "out", scales="absmax", group_size=group_size)
    check_against_oracle(source, load_output(tmp_path / "out"), group_size)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("quantization_config" in config) == (model_type != "kimi_k25")
    weights = config.get("text_config", config)["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert weights["group_size"] == group_size
    assert weights["actorder"] is None


def test_other_names_and_places_of_the_scale_give_the_same_bytes(tiny_checkpoint, tmp_path):
    plain = tiny_checkpoint("plain")
    convert(plain.directory, tmp_path / "plain-out")
    expected = load_output(tmp_path / "plain-out")
    variants = {
        "same-shard": {"cross_shard": False},
        "scale-only-shard": {"scale_only_shard": True},
        "weight_scale": {"scale_suffix": "weight_scale"},
        "scale": {"scale_suffix": "scale"},
        "one-shard": {"num_shards": 1},
        "five-shards": {"num_shards": 5},
        "fused": {"fused_experts": True},
        "fused-scale-only": {"fused_experts": True, "scale_only_shard": True},
    }
    for name, switches in variants.items():
        source = tiny_checkpoint(name, **switches)
        convert(source.directory, tmp_path / f"{name}-out")
        got = load_output(tmp_path / f"{name}-out")
        assert set(got) == set(expected), name
        assert all(same(got[key], expected[key]) for key in expected), name


def test_fused_bf16_experts_give_the_bytes_of_single_ones(tiny_checkpoint, tmp_path):
    for form in ("bf16", "f16"):
        single = tiny_checkpoint(f"{form}-single", source_format=form)
        fused = tiny_checkpoint(f"{form}-fused", source_format=form, fused_experts=True)
        assert any(name.endswith("experts.gate_up_proj") for shard in fused.shards.values() for name in shard)
        convert(single.directory, tmp_path / f"{form}-a")
        convert(fused.directory, tmp_path / f"{form}-b")
        first, second = load_output(tmp_path / f"{form}-a"), load_output(tmp_path / f"{form}-b")
        assert set(first) == set(second)
        assert all(same(first[name], second[name]) for name in first)


def test_up_half_of_a_fused_tensor_may_begin_inside_a_block(tiny_checkpoint, tmp_path):
    width = 192  # gate has one and a half blocks of rows
    source = tiny_checkpoint(write=False, config_changes={"moe_intermediate_size": width})
    prefix = "model.layers.1.mlp.experts"
    joined, scales = [], []
    for expert in range(EXPERTS):
        for leaf in ("gate_proj", "up_proj"):
            source.remove(f"{prefix}.{expert}.{leaf}.weight")
            source.remove(f"{prefix}.{expert}.{leaf}.weight_scale_inv")
        # rows of very different size, so that a scale taken from a neighbouring block shows
        weight = torch.randn(2 * width, HIDDEN) * torch.logspace(-3, 0, 2 * width).unsqueeze(1)
        codes, scale = quantize_fp8_blocks(weight)
        decoded = codes.float() * expand(scale, 2 * width, HIDDEN)
        source.decoded[f"{prefix}.{expert}.gate_proj.weight"] = decoded[:width]
        source.decoded[f"{prefix}.{expert}.up_proj.weight"] = decoded[width:]
        joined.append(codes.view(torch.uint8))
        scales.append(scale)
    down = [source.remove(f"{prefix}.{e}.down_proj.weight").view(torch.uint8) for e in range(EXPERTS)]
    down_scale = [source.remove(f"{prefix}.{e}.down_proj.weight_scale_inv") for e in range(EXPERTS)]
    source.put(f"{prefix}.gate_up_proj", torch.stack(joined).view(FP8))
    source.put(f"{prefix}.gate_up_proj_scale_inv", torch.stack(scales))
    source.put(f"{prefix}.down_proj", torch.stack(down).view(FP8))
    source.put(f"{prefix}.down_proj_scale_inv", torch.stack(down_scale))
    source.write()
    convert(source.directory, tmp_path / "out", scales="absmax")
    check_against_oracle(source, load_output(tmp_path / "out"))


def test_transposed_fused_experts_are_refused(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format="bf16", fused_experts=True, write=False)
    for leaf in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{leaf}"
        source.put(name, source.tensor(name).transpose(1, 2).contiguous())
    source.write()
    with pytest.raises(SourceError, match=r"expert, out, in|config\.json makes it"):
        convert(source.directory, tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_of_other_dtypes(dtype, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(scale_dtype=dtype)
    report = convert(source.directory, tmp_path / "out", scales="absmax")
    check_against_oracle(source, load_output(tmp_path / "out"))
    assert report.classes[0].relative < 0.11


def test_e8m0_scales_stored_as_bytes_are_decoded_alike(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(scale_dtype=torch.float8_e8m0fnu, write=False)
    for tensors in source.shards.values():
        for name, tensor in tensors.items():
            if name.endswith("weight_scale_inv"):
                tensors[name] = tensor.view(torch.uint8)
    source.write()
    convert(source.directory, tmp_path / "out", scales="absmax")
    check_against_oracle(source, load_output(tmp_path / "out"))


@pytest.mark.parametrize("group_size", [32, 64])
def test_mxfp8_blocks_of_one_row_and_32_columns(group_size, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.config["quantization_config"]["weight_block_size"] = [1, 32]
    for tensors in source.shards.values():
        for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
            weight_name = name.removesuffix("_scale_inv")
            rows, cols = source.tensor(weight_name).shape
            weight = source.decoded[weight_name] * torch.logspace(-2, 0, cols)  # neighbouring blocks differ
            _, scale = quantize_fp8_blocks(weight, (1, 32))
            exponent = torch.ceil(torch.log2(scale))
            grid = expand(torch.exp2(exponent), rows, cols, (1, 32))
            codes = (weight / grid).to(FP8)
            source.put(weight_name, codes)
            tensors[name] = (exponent + 127).to(torch.uint8)
            source.decoded[weight_name] = codes.float() * grid
    source.write()
    absmax = convert(source.directory, tmp_path / "out", scales="absmax", group_size=group_size)
    check_against_oracle(source, load_output(tmp_path / "out"), group_size)
    search = convert(source.directory, tmp_path / "search", group_size=group_size)
    assert search.classes[0].relative < 0.95 * absmax.classes[0].relative


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_nested_prefixes_are_kept(prefix, tiny_checkpoint, tmp_path):
    plain = tiny_checkpoint("plain")
    nested = tiny_checkpoint("nested", prefix=prefix)
    convert(plain.directory, tmp_path / "plain-out")
    convert(nested.directory, tmp_path / "nested-out")
    expected, got = load_output(tmp_path / "plain-out"), load_output(tmp_path / "nested-out")
    for name, tensor in expected.items():
        renamed = prefix + name.removeprefix("model.") if name.startswith("model.") else name
        candidates = [renamed, "language_model." + name]
        found = next(candidate for candidate in candidates if candidate in got)
        assert same(got[found], tensor), name
    assert len(got) == len(expected)


@pytest.mark.parametrize(("rows", "cols"), [(192, 256), (576, 256), (100, 192), (1, 64)])
def test_ragged_blocks_in_a_family_without_a_file(rows, cols, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.config["model_type"] = "never_heard_of"
    weight = torch.randn(rows, cols) * torch.logspace(-2, 0, rows).unsqueeze(1)
    codes, scale = quantize_fp8_blocks(weight)
    name = "model.layers.1.mlp.experts.0.gate_proj.weight"
    source.put(name, codes)
    source.put(name + "_scale_inv", scale)
    source.write()
    convert(source.directory, tmp_path / "out", scales="absmax")
    packed, expected_scale = oracle_int4(codes.float() * expand(scale, rows, cols), 32)
    output = load_output(tmp_path / "out")
    module = name.removesuffix(".weight")
    assert same(output[f"{module}.weight_packed"], packed)
    assert same(output[f"{module}.weight_scale"], expected_scale)


def test_group_that_does_not_divide_is_refused_for_known_experts(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(config_changes={"moe_intermediate_size": 192})
    with pytest.raises(RecipeError, match=r"down_proj\.weight.*192 columns"):
        convert(source.directory, tmp_path / "out", group_size=128)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model_type", ["kimi_k2", "kimi_k25"])
def test_native_int4_passes_through_bit_for_bit(model_type, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type=model_type, source_format="int4_native")
    report = convert(source.directory, tmp_path / "out")
    output = load_output(tmp_path / "out")
    stored = {name: tensor for shard in source.shards.values() for name, tensor in shard.items()}
    assert set(output) == set(stored)
    assert all(same(output[name], stored[name]) for name in stored)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == source.config
    assert any("INT4 already" in warning for warning in report.plan.warnings)


def test_native_int4_is_never_regrouped(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="kimi_k2", source_format="int4_native")
    with pytest.raises(RecipeError, match="INT4 already, in groups of 32"):
        convert(source.directory, tmp_path / "out", group_size=64)


def test_fp16_sources_become_bf16(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format="f16", config_changes={"dtype": "float16"})
    convert(source.directory, tmp_path / "out")
    output = load_output(tmp_path / "out")
    assert not [name for name, tensor in output.items() if tensor.dtype == torch.float16]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_router_bias_stays_float32_bit_for_bit(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format="f16")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert source.tensor(name).dtype == torch.float32
    convert(source.directory, tmp_path / "out")
    assert same(load_output(tmp_path / "out")[name], source.tensor(name))


def test_single_file_of_any_name_without_index(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(num_shards=1, write=False)
    expected = tiny_checkpoint("plain", num_shards=1)
    source.shards = {"weights-final.safetensors": next(iter(source.shards.values()))}
    source.write(with_index=False, metadata={})
    convert(source.directory, tmp_path / "out")
    convert(expected.directory, tmp_path / "expected")
    got, wanted = load_output(tmp_path / "out"), load_output(tmp_path / "expected")
    assert set(got) == set(wanted)
    assert all(same(got[name], wanted[name]) for name in wanted)
    assert (tmp_path / "out" / "weights-final.safetensors").is_file()


def test_hub_cache_snapshot_of_links_gives_the_same_directory(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    (source.directory / "tokenizer.json").write_text("{}")
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in source.directory.iterdir():
        (blobs / f"blob-{path.name}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/blob-{path.name}")
    convert(source.directory, tmp_path / "direct")
    convert(snapshot, tmp_path / "linked")
    assert directory_bytes(tmp_path / "direct") == directory_bytes(tmp_path / "linked")
    assert (tmp_path / "linked" / "tokenizer.json").is_file()


def test_mtp_layer_comes_out_whole(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(mtp=True)
    convert(source.directory, tmp_path / "out", scales="absmax")
    output = load_output(tmp_path / "out")
    names = {name for name in source.decoded if name.startswith("model.layers.2.")}
    assert any(name.endswith("eh_proj.weight") for name in names)
    for name in names:
        module = name.removesuffix(".weight")
        assert name in output or f"{module}.weight_packed" in output, name
    assert same(output["model.layers.2.eh_proj.weight"], source.tensor("model.layers.2.eh_proj.weight"))
    assert "model.layers.2.mlp.experts.0.gate_proj.weight_packed" in output


def test_a_block_of_zeros_with_scale_zero_is_legal(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    name = "model.layers.1.mlp.experts.0.gate_proj.weight"
    codes = source.tensor(name).view(torch.uint8)
    codes[:, :BLOCK] = 0
    codes[0, 0] = 0x80  # minus zero
    source.tensor(name + "_scale_inv")[0, 0] = 0
    source.decoded[name] = codes.view(FP8).float() * expand(source.tensor(name + "_scale_inv"), *codes.shape)
    source.write()
    for scales in ("search", "absmax"):
        convert(source.directory, tmp_path / scales, scales=scales)
    check_against_oracle(source, load_output(tmp_path / "absmax"))
    searched = load_output(tmp_path / "search")
    module = name.removesuffix(".weight")
    assert torch.all(searched[f"{module}.weight_packed"][:, : BLOCK // 8] == -0x77777778)
    assert torch.all(searched[f"{module}.weight_scale"][:, : BLOCK // 32] == 2.0**-7)


@pytest.mark.parametrize("form", ["bf16", "f32"])
@pytest.mark.parametrize("size", [1e-41, 1e-40, 1e-7, 1e6, 1e30])
def test_tiny_and_huge_groups_convert_to_finite_numbers(form, size, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format=form, write=False)
    name = "model.layers.1.mlp.experts.1.down_proj.weight"
    source.tensor(name)[0, :32] = size
    source.write()
    convert(source.directory, tmp_path / "out")
    output = load_output(tmp_path / "out")
    scale = output[name.removesuffix(".weight") + ".weight_scale"].float()
    assert torch.isfinite(scale).all()
    assert (scale != 0).all()
