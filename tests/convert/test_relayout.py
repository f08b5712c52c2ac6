"""INT4 that is there already, in another layout: the same codes, scales and zero points, or a refusal."""

import json

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from quantkit.convert.local import Share, execute
from tests.classic import make_classic
from tests.cli.test_commands import document, run
from tests.convert.helpers import convert, directory_bytes, load_output, same
from tests.convert.plans import plan_of

EXPERT = "model.layers.1.mlp.experts.2.down_proj"


def relayout(source, target, layout, *options):
    return run("relayout", source, target, "--format", layout, *options)


def w4a8(tiny_checkpoint, tmp_path, **changes):
    """An output in groups of 128 with positive scales, and the FP8 source that it was made from."""
    source = tiny_checkpoint(mtp=True)
    convert(source.directory, tmp_path / "made", group_size=128, signed_scales=False, **changes)
    return source, tmp_path / "made"


def shards_of(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors*"))}


def test_there_and_back_is_bit_exact(tiny_checkpoint, tmp_path):
    source, made = w4a8(tiny_checkpoint, tmp_path, rest="fp8-native", engine="sglang")
    assert relayout(made, tmp_path / "w4", "w4afp8").returncode == 0
    options = ("--rest", "fp8-native", "--engine", "sglang")
    assert relayout(tmp_path / "w4", tmp_path / "back", "compressed-tensors", *options).returncode == 0
    assert shards_of(tmp_path / "back") == shards_of(made)
    assert (tmp_path / "back" / "config.json").read_bytes() == (made / "config.json").read_bytes()
    first, second = load_output(made), load_output(tmp_path / "w4")
    codes = unpack_from_int32(first[f"{EXPERT}.weight_packed"], 4, torch.Size((256, 128)))
    stored = second[f"{EXPERT}.weight"]
    assert stored.dtype == torch.int8
    assert torch.equal((stored << 4) >> 4, codes[:, ::2])
    assert torch.equal(stored >> 4, codes[:, 1::2])
    assert same(second[f"{EXPERT}.weight_scale_inv"], first[f"{EXPERT}.weight_scale"])
    for command in (("verify", tmp_path / "w4", "--source", made), ("verify", tmp_path / "back", "--engine", "sglang")):
        assert run(*command).returncode == 0, command
    assert source.directory.is_dir()


def test_w4afp8_of_a_source_is_that_source_but_for_its_experts(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(mtp=True)
    convert(source.directory, tmp_path / "w4", layout="w4afp8")
    config = json.loads((tmp_path / "w4" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "w4afp8"}
    before = {name: one for path in source.directory.glob("*.safetensors") for name, one in load_file(path).items()}
    after = load_output(tmp_path / "w4")
    assert set(after) == set(before)
    for name, tensor in after.items():
        if ".experts." not in name:
            assert same(tensor, before[name]), name
    experts = {name for name in after if ".experts." in name}
    assert {after[name].dtype for name in experts if name.endswith(".weight")} == {torch.int8}
    assert all((after[name].float() > 0).all() for name in experts if name.endswith("_inv"))
    assert run("verify", tmp_path / "w4", "--source", source.directory, "--engine", "sglang").returncode == 0
    assert run("verify", tmp_path / "w4", "--engine", "vllm").returncode == 4


def test_codes_are_those_of_the_other_layout(tiny_checkpoint, tmp_path):
    """Converting into one layout and moving to the other gives the files of converting into the other."""
    source, made = w4a8(tiny_checkpoint, tmp_path)
    convert(source.directory, tmp_path / "w4", layout="w4afp8")
    assert relayout(tmp_path / "w4", tmp_path / "moved", "compressed-tensors").returncode == 0
    assert shards_of(tmp_path / "moved") == shards_of(made)
    found = document(run("verify", tmp_path / "moved", "--source", tmp_path / "w4", "--json"), "verify")
    assert found["status"] == "ok"


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, ("w4afp8",), "groups of 32, and kernels for FP8 activations read 128"),
        ({"group_size": 128}, ("w4afp8",), "was made with scales of either sign"),
        ({}, ("compressed-tensors", "--activations", "fp8-dynamic"), "groups of 32"),
        ({"group_size": 128}, ("compressed-tensors", "--activations", "fp8-dynamic"), "scales of either sign"),
    ],
)
def test_what_cannot_be_exact_is_refused(changes, options, words, tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint().directory, tmp_path / "made", **changes)
    for dry in ((), ("--dry-run",)):
        refused = relayout(tmp_path / "made", tmp_path / "out", *options, *dry)
        assert refused.returncode == 2, refused.stderr
        assert words in refused.stderr
    assert "--group-size 128 --positive-scales" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_signs_that_no_manifest_tells_are_found_as_they_are_read(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint().directory, tmp_path / "made", group_size=128)
    (tmp_path / "made" / "conversion.json").unlink()
    refused = relayout(tmp_path / "made", tmp_path / "out", "w4afp8")
    assert refused.returncode == 2
    assert (
        "signs of scales are looked at as they are read"
        in relayout(tmp_path / "made", tmp_path / "out", "w4afp8", "--dry-run").stderr
    )
    assert "has scales below zero" in refused.stderr
    assert "weight_scale" in refused.stderr


def test_a_rest_in_bf16_goes_back_into_the_blocks_that_it_was_decoded_from(tiny_checkpoint, tmp_path):
    """Codes as the FP8 source has them, scales that decode to the same BF16; and back again the same files."""
    source, made = w4a8(tiny_checkpoint, tmp_path)
    moved = relayout(made, tmp_path / "w4", "w4afp8")
    assert moved.returncode == 0, moved.stderr
    assert "BF16 Linears go back into the FP8 blocks" in moved.stderr
    after = load_output(tmp_path / "w4")
    codes = [name for name, one in after.items() if one.dtype == torch.float8_e4m3fn]
    assert len(codes) == 27
    for name in codes:
        scale = name.replace(".weight", ".weight_scale_inv")
        assert same(after[name].view(torch.uint8), source.tensor(name).view(torch.uint8)), name
        assert torch.allclose(after[scale], source.tensor(scale), rtol=2**-8, atol=0), name
    assert relayout(tmp_path / "w4", tmp_path / "back", "compressed-tensors").returncode == 0
    assert shards_of(tmp_path / "back") == shards_of(made)
    found = run("verify", tmp_path / "w4", "--source", made, "--engine", "sglang")
    assert found.returncode == 0, found.stdout


def test_bf16_that_was_never_fp8_is_refused(tiny_checkpoint, tmp_path):
    _, made = w4a8(tiny_checkpoint, tmp_path)
    (made / "conversion.json").unlink()
    shard = sorted(made.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name].view(torch.int16)[130 % tensors[name].shape[0], 7] += 1
    save_file(tensors, shard)
    refused = relayout(made, tmp_path / "w4", "w4afp8")
    assert refused.returncode == 2
    assert name in refused.stderr
    assert "no FP8 block decodes to its BF16" in refused.stderr
    assert not (tmp_path / "w4").exists()


def test_no_split_changes_what_is_put_back(tiny_checkpoint, tmp_path):
    _, made = w4a8(tiny_checkpoint, tmp_path)
    plan = plan_of(made, layout="w4afp8", rules=[])
    results = []
    for task_bytes in (1 << 10, 1 << 24):
        directory = tmp_path / str(task_bytes)
        directory.mkdir()
        execute(plan, Share(directory=directory), num_jobs=2, task_bytes=task_bytes)
        results.append(directory_bytes(directory))
    assert results[0] == results[1]


def test_the_document_and_the_summary(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint(mtp=True).directory, tmp_path / "w4", layout="w4afp8")
    options = ("--mtp", "drop", "--json", "--summary", tmp_path / "summary.md")
    found = document(relayout(tmp_path / "w4", tmp_path / "out", "compressed-tensors", *options), "relayout")
    assert (found["command"], found["status"], found["errors"]) == ("relayout", "ok", [])
    assert not any(name.startswith("model.layers.2.") for name in load_output(tmp_path / "out"))
    assert "## quantkit relayout: ok" in (tmp_path / "summary.md").read_text()
    planned = document(relayout(tmp_path / "w4", tmp_path / "no", "compressed-tensors", "--dry-run", "--json"), "plan")
    assert {one["action"] for one in planned["parts"]} >= {"relayout", "to bf16", "copy"}
    assert not (tmp_path / "no").exists()


def test_a_source_without_int4_has_nothing_to_move(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    for layout in ("compressed-tensors", "w4afp8"):
        refused = relayout(source, tmp_path / "out", layout)
        assert refused.returncode == 2
        assert "holds no INT4" in refused.stderr


def test_native_kimi_passes_and_is_no_w4afp8(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="kimi_k25", source_format="int4_native")
    assert relayout(source.directory, tmp_path / "out", "compressed-tensors").returncode == 0
    before, after = load_file(next(iter(source.directory.glob("*00001*")))), load_output(tmp_path / "out")
    assert all(same(after[name], one) for name, one in before.items())
    refused = relayout(source.directory, tmp_path / "w4", "w4afp8")
    assert refused.returncode == 2
    assert "groups of 32" in refused.stderr


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq", "auto_round:auto_gptq", "auto_round:auto_awq"])
def test_other_tools_layouts_are_moved(layout, symmetric, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format="bf16")
    made = make_classic(source, layout, symmetric=symmetric)
    moved = relayout(source.directory, tmp_path / "out", "compressed-tensors")
    assert moved.returncode == 0, moved.stderr
    after = load_output(tmp_path / "out")
    for module, (unsigned, scale, zero) in made.items():
        codes = unpack_from_int32(after[f"{module}.weight_packed"], 4, unsigned.shape)
        assert torch.equal(codes, (unsigned - 8).to(torch.int8))
        assert same(after[f"{module}.weight_scale"], scale)
        assert after[f"{module}.weight_shape"].tolist() == list(unsigned.shape)
        assert (f"{module}.weight_zero_point" in after) == (not symmetric)
        if not symmetric:
            found = unpack_from_int32(after[f"{module}.weight_zero_point"], 4, zero.shape, packed_dim=0)
            assert torch.equal(found, (zero - 8).to(torch.int8))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["symmetric"] == symmetric
    assert run("verify", tmp_path / "out", "--source", source.directory).returncode == 0
    assert run("verify", tmp_path / "out", "--engine", "vllm").returncode == 0
    assert run("verify", tmp_path / "out", "--engine", "sglang").returncode == (0 if symmetric else 4)
    named = relayout(source.directory, tmp_path / "named", "compressed-tensors", "--engine", "sglang")
    assert named.returncode == (0 if symmetric else 4)
    if not symmetric:
        assert "asymmetric experts" in named.stderr


@torch.no_grad()
@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_transformers_decodes_what_was_moved(layout, tiny_checkpoint, tmp_path):
    """The logits of the moved checkpoint are those of its weights computed by hand."""
    from transformers import AutoModelForCausalLM

    source = tiny_checkpoint(source_format="bf16", model_type="deepseek_v3")
    made = make_classic(source, layout)  # transformers 5.17 passes zero points of experts over
    assert relayout(source.directory, tmp_path / "out", "compressed-tensors").returncode == 0
    for module, (unsigned, scale, zero) in made.items():
        for leaf in ("qweight", "scales", "qzeros", "g_idx"):
            if any(f"{module}.{leaf}" in tensors for tensors in source.shards.values()):
                source.remove(f"{module}.{leaf}")
        wide = [one.repeat_interleave(32, 1) for one in (scale.float(), zero)]
        source.put(f"{module}.weight", ((unsigned - wide[1]) * wide[0]).to(torch.bfloat16))
    del source.config["quantization_config"]
    source.write()
    tokens = torch.arange(1, 20).unsqueeze(0)
    logits = [
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)(tokens).logits.float()
        for directory in (source.directory, tmp_path / "out")
    ]
    assert (logits[0] - logits[1]).abs().mean() / logits[0].abs().mean() < 0.02


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_compressed_tensors_decodes_zero_points(layout, tiny_checkpoint, tmp_path):
    """The library's own decompression of every moved weight, against the definition of the layout it came from."""
    source = tiny_checkpoint(source_format="bf16")
    made = make_classic(source, layout, symmetric=False)
    assert relayout(source.directory, tmp_path / "out", "compressed-tensors").returncode == 0
    after = load_output(tmp_path / "out")
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=32),
        format="pack-quantized",
    )
    for module, (unsigned, scale, zero) in made.items():
        parts = {name.rpartition(".")[2]: one for name, one in after.items() if name.rpartition(".")[0] == module}
        decoded = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
        wide = [one.repeat_interleave(32, 1) for one in (scale.float(), zero)]
        assert torch.equal(decoded.float(), ((unsigned - wide[1]) * wide[0]).half().float())


def test_columns_in_another_order_are_refused(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format="bf16")
    make_classic(source, "gptq")
    order = source.tensor(f"{EXPERT}.g_idx")
    order[[0, 40]] = order[[40, 0]]
    source.write()
    refused = relayout(source.directory, tmp_path / "out", "compressed-tensors")
    assert refused.returncode == 2
    assert "desc_act" in refused.stderr
    assert f"{EXPERT}.g_idx" in refused.stderr


def test_zero_points_that_the_config_denies_are_refused(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format="bf16")
    make_classic(source, "gptq_v2", symmetric=False)
    source.config["quantization_config"]["sym"] = True
    source.write_config()
    refused = relayout(source.directory, tmp_path / "out", "compressed-tensors")
    assert refused.returncode == 3
    assert "denies zero points" in refused.stderr


@pytest.mark.parametrize(
    ("layout", "change", "words"),
    [
        ("gptq", {"bits": 8}, "of 8 bits"),
        ("gptq", {"group_size": -1}, "group_size -1"),
        ("gptq", {"group_size": 64}, "needs"),
        ("gptq", {"dynamic": {"a": {}}}, "settings of its own"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("awq", {"version": "gemv"}, "version 'gemv'"),
        ("awq", {"zero_point": None}, "does not say whether it has zero points"),
        ("auto_round:auto_gptq", {"packing_format": "auto_round"}, "packing_format 'auto_round'"),
    ],
)
def test_forms_that_are_not_read_are_named(layout, change, words, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format="bf16")
    make_classic(source, layout)
    source.config["quantization_config"] |= change
    source.write_config()
    refused = relayout(source.directory, tmp_path / "out", "compressed-tensors")
    assert refused.returncode == 3, refused.stderr
    assert words in refused.stderr


def test_activation_scales_of_w4afp8_stay_with_it_and_are_left_out_elsewhere(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint(mtp=True).directory, tmp_path / "w4", layout="w4afp8")
    shard = sorted((tmp_path / "w4").glob("*.safetensors"))[-1]
    tensors = load_file(shard)
    names = [name for name in tensors if name.endswith("down_proj.weight") and ".experts." in name]
    added = {name.replace("down_proj.weight", "w2.input_scale"): torch.tensor(0.5) for name in names}
    save_file(tensors | added, shard)
    index = json.loads((tmp_path / "w4" / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(added, shard.name)
    (tmp_path / "w4" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "w4" / "conversion.json").unlink()
    assert names
    moved = relayout(tmp_path / "w4", tmp_path / "ct", "compressed-tensors")
    assert moved.returncode == 0, moved.stderr
    assert f"{len(names)} static activation scales of the source are left out" in moved.stderr
    assert run("verify", tmp_path / "w4", "--engine", "sglang").returncode == 0
    copied = run("convert", tmp_path / "w4", "--to", "int4", "--format", "w4afp8", "-o", tmp_path / "copy")
    assert copied.returncode == 0, copied.stderr
    assert set(added) <= set(load_output(tmp_path / "copy"))
