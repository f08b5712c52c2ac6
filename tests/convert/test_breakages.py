"""What a hostile tester broke once: garbage that looked finished, crashes, and work of others lost."""

import json
import os

import pytest
import torch

from quantkit.errors import QuantkitError, SourceError
from quantkit.sources import resolve_source
from tests.convert.helpers import convert, directory_bytes, load_output, same
from tests.convert.plans import plan_of
from tests.tiny import FP8

EXPERT = "model.layers.1.mlp.experts.1.gate_proj"


def refused(source, tmp_path, match, **changes):
    siblings = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(QuantkitError, match=match) as caught:
        convert(source.directory, tmp_path / "out", **changes)
    assert {path.name for path in tmp_path.iterdir()} == siblings
    assert caught.value.exit_code == 3
    return caught.value


def generic(make, tensors):
    """A checkpoint of a family without a file, of these tensors alone."""
    source = make(source_format="bf16", num_shards=1, write=False)
    source.config = {"model_type": "never_heard_of", "dtype": "bfloat16"}
    source.shards = {"model.safetensors": tensors}
    source.write()
    return source


@pytest.mark.parametrize("switches", [{"source_format": "int4_native"}, {"fused_experts": True}])
def test_one_weight_in_two_forms(switches, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False, model_type="kimi_k2", **switches)
    source.put(f"{EXPERT}.weight", torch.ones(128, 256, dtype=torch.bfloat16))
    source.write()
    refused(source, tmp_path, "stored twice")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.bool])
@pytest.mark.parametrize("module", [EXPERT, "model.layers.0.self_attn.o_proj"])
def test_weights_that_are_no_floats(module, dtype, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format="bf16", write=False)
    source.put(f"{module}.weight", torch.ones(source.tensor(f"{module}.weight").shape, dtype=dtype))
    source.write()
    assert refused(source, tmp_path, "what its numbers stand for").tensor == f"{module}.weight"


def test_norm_that_is_no_float(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format="bf16", write=False)
    source.put("model.norm.weight", torch.ones(256, dtype=torch.int64))
    source.write()
    refused(source, tmp_path, "made of floats")


def test_double_experts_are_not_left_as_they_are(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format="bf16", write=False)
    for name in [name for shard in source.shards.values() for name in shard if ".experts." in name]:
        source.put(name, source.tensor(name).double())
    source.write()
    refused(source, tmp_path, "cannot be made INT4")


def test_double_norm_with_nan(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format="bf16", write=False)
    source.put("model.norm.weight", torch.full((256,), float("nan"), dtype=torch.float64))
    source.write()
    refused(source, tmp_path, "holds nan")


def test_experts_in_one_tensor_of_an_unknown_form(tiny_checkpoint, tmp_path):
    tensors = {f"layers.0.block_sparse_moe.experts.w{i}": torch.randn(4, 64, 64) for i in (1, 2, 3)}
    tensors["layers.1.experts.0.w1.weight"] = torch.randn(64, 64)
    refused(generic(tiny_checkpoint, tensors), tmp_path, "form that is not known")


def test_fused_tensor_without_experts(tiny_checkpoint, tmp_path):
    tensors = {
        "layers.0.experts.gate_up_proj": torch.randn(0, 64, 32),
        "layers.0.experts.down_proj": torch.randn(0, 32, 32),
    }
    refused(generic(tiny_checkpoint, tensors), tmp_path, "does not hold 1 to 4000 experts")


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 1}, {"n_routed_experts": 3}])
def test_more_in_the_shards_than_the_config_counts(changes, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.config |= changes
    source.write()
    refused(source, tmp_path, "lies beyond|config.json makes it")


@pytest.mark.parametrize("shape", [[7, 9], [128, 255]])
def test_native_shape_that_lies(shape, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="kimi_k2", source_format="int4_native", write=False)
    source.put(f"{EXPERT}.weight_shape", torch.tensor(shape, dtype=torch.int32))
    source.write()
    refused(source, tmp_path, "but the weight is")
    source.put(f"{EXPERT}.weight_shape", torch.tensor([5.0, 5.0]))
    source.write()
    refused(source, tmp_path, "not two integers")


@pytest.mark.parametrize(
    "change",
    [
        lambda section: section["config_groups"]["group_0"].update(targets=["re:.*foo"]),
        lambda section: section["config_groups"]["group_0"].update(input_activations={"num_bits": 8}),
        lambda section: section["config_groups"]["group_0"]["weights"].update(actorder="weight"),
        lambda section: section.update(kv_cache_scheme={"num_bits": 8}),
        lambda section: section.update(sparsity_config={"targets": ["Linear"]}),
        lambda section: section.update(ignore=["re:("]),
        lambda section: section.update(ignore=[1]),
        lambda section: section.update(format="naive-quantized"),
    ],
)
def test_native_declarations_that_engines_refuse_or_misread(change, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="kimi_k2", source_format="int4_native", write=False)
    change(source.config["quantization_config"])
    source.write()
    refused(source, tmp_path, "quantization_config")


def test_router_bias_in_half_precision_keeps_its_values(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format="f16", write=False)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = torch.tensor([34.5, 34.53, 34.56, 34.625], dtype=torch.float16)
    source.put(name, bias)
    source.write()
    convert(source.directory, tmp_path / "out")
    assert same(load_output(tmp_path / "out")[name], bias)


@pytest.mark.parametrize("spelling", ["half", "float16", "torch.float16"])
def test_half_precision_in_any_spelling_and_depth_becomes_bfloat16(spelling, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format="f16", write=False)
    source.config |= {"torch_dtype": spelling, "extra": {"deep": {"dtype": spelling}}}
    source.write()
    convert(source.directory, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["torch_dtype"], config["extra"]["deep"]["dtype"]) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"a": NaN}', "not a JSON number"),
        ('{"a": 1, "a": 2}', "stands twice"),
        ('{"a": "\\ud800"}', "surrogates"),
        ('{"a": ' + "[" * 900 + "]" * 900 + "}", "deep"),
    ],
)
def test_config_that_cannot_be_written_again(text, match, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    (source.directory / "config.json").write_text(text)
    refused(source, tmp_path, match)


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_routed_experts", "num_nextn_predict_layers"])
@pytest.mark.parametrize("value", [10**12, -1, "x", 2.5, True, [1]])
def test_counts_that_no_model_has(key, value, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.config[key] = value
    source.write()
    refused(source, tmp_path, "is missing|not a count")


@pytest.mark.parametrize("value", ["x", [1], 5, True])
@pytest.mark.parametrize("key", ["vision_config", "merge_kernel_size"])
def test_vision_sections_of_another_type(key, value, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="kimi_k25", source_format="bf16", write=False)
    target = source.config if key == "vision_config" else source.config["vision_config"]
    source.config["vision_config"] = dict(source.config["vision_config"])
    target = source.config if key == "vision_config" else source.config["vision_config"]
    target[key] = value
    source.write()
    refused(source, tmp_path, key)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_pipes_are_not_waited_for(name, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    (source.directory / name).unlink()
    os.mkfifo(source.directory / name)
    refused(source, tmp_path, "not a regular file")


def test_two_incomplete_sets_of_shards_without_an_index(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    (source.directory / "model.safetensors.index.json").unlink()
    whole = (source.directory / "model-00001-of-00002.safetensors").read_bytes()
    for stray in ("zz-00001-of-00003.safetensors", "model-00003-of-00002.safetensors"):
        (source.directory / stray).write_bytes(whole)
        refused(source, tmp_path, "missing|rules out")
        (source.directory / stray).unlink()


def test_links_out_of_the_checkpoint(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    for name in ("model-00001-of-00002.safetensors", "config.json", "model.safetensors.index.json"):
        path, outside = source.directory / name, tmp_path / f"outside-{name}"
        path.rename(outside)
        path.symlink_to(outside)
        refused(source, tmp_path, "link that leaves")
        path.unlink()
        outside.rename(path)
    convert(source.directory, tmp_path / "out")


def test_names_that_end_alike_are_told_apart(tiny_checkpoint, tmp_path):
    tensors = {"proj.weight": torch.randn(64, 64), "layers.0.proj.weight": torch.randn(64, 64)}
    source = generic(tiny_checkpoint, tensors)
    convert(source.directory, tmp_path / "out")
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "proj" in section["ignore"]
    assert "layers.0.proj.weight_packed" in load_output(tmp_path / "out")


def test_sisters_of_an_expert_that_cannot_be_cut_stay_too(tiny_checkpoint, tmp_path):
    tensors = {}
    for leaf, shape in (("gate_proj", (32, 192)), ("up_proj", (32, 192)), ("down_proj", (192, 128))):
        tensors[f"layers.0.mlp.experts.0.{leaf}.weight"] = torch.randn(shape)
        tensors[f"layers.1.mlp.experts.0.{leaf}.weight"] = torch.randn(128, 128)
    report = convert(generic(tiny_checkpoint, tensors).directory, tmp_path / "out", group_size=128)
    output = load_output(tmp_path / "out")
    assert {name for name in output if name.startswith("layers.0.")} == {
        name for name in tensors if "layers.0." in name
    }
    assert any("3 weights are not quantized" in warning for warning in report.plan.warnings)


def test_sidecar_names_that_cannot_be_written_are_skipped(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    (source.directory / os.fsdecode(b"\xff.txt")).write_text("x")
    for name in ("README.md", "conversion.json"):
        (source.directory / name).mkdir()
        (source.directory / name / "inside.txt").write_text("x")
    convert(source.directory, tmp_path / "out")
    skipped = json.loads((tmp_path / "out" / "conversion.json").read_text())["skipped_files"]
    assert skipped["README.md/inside.txt"].startswith("would stand")
    assert [reason for reason in skipped.values() if "UTF-8" in reason]


def test_empty_tensors_of_absurd_shape(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    path = source.directory / "extra.safetensors"
    header = json.dumps({"x": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    (source.directory / "model.safetensors.index.json").unlink()
    refused(source, tmp_path, "has shape")
    header = json.dumps({"x": {"dtype": "F32", "shape": [1] * 300_000, "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    refused(source, tmp_path, "has shape")


def test_zero_rows_convert_and_verify(tiny_checkpoint, tmp_path):
    from quantkit.checkpoint.source import open_checkpoint
    from quantkit.verify.verify import verify_output

    tensors = {"layers.0.a.weight": torch.randn(64, 64), "layers.0.b.bias": torch.zeros(0, 64, dtype=torch.float16)}
    source = generic(tiny_checkpoint, tensors)
    convert(source.directory, tmp_path / "out")
    assert verify_output(tmp_path / "out", source=open_checkpoint(source.directory)).is_good


def test_checkpoint_without_tensors(tiny_checkpoint, tmp_path):
    source = generic(tiny_checkpoint, {})
    (source.directory / "model.safetensors.index.json").unlink()
    refused(source, tmp_path, "holds no tensors", allow_unmatched=True)


def test_finished_output_that_somebody_renamed_is_not_removed(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    convert(source.directory, tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "out.partial")
    (tmp_path / "out.partial" / "my-notes.txt").write_text("x")
    before = directory_bytes(tmp_path / "out.partial")
    with pytest.raises(QuantkitError, match="not ours"):
        convert(source.directory, tmp_path / "out")
    assert directory_bytes(tmp_path / "out.partial") == before


def test_native_int4_beside_fp8_attention_declares_what_is_done(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="kimi_k2", source_format="int4_native", write=False)
    name = "model.layers.0.self_attn.o_proj.weight"
    codes = source.tensor(name).float().mul(100).to(FP8)
    source.put(name, codes)
    source.put(name + "_scale_inv", torch.full((2, 1), 0.01))
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}}
    source.config["quantization_config"]["config_groups"]["fp8"] = group | {"targets": ["re:.*o_proj$"]}
    source.write()
    convert(source.directory, tmp_path / "out")
    assert same(load_output(tmp_path / "out")[name], (codes.float() * 0.01).to(torch.bfloat16))
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert list(section["config_groups"]) == ["group_0"]


def test_empty_source_name():
    with pytest.raises(QuantkitError, match="SOURCE is missing"):
        resolve_source("")


def test_plan_marks_what_is_missing_by_leave(tiny_checkpoint):
    source = tiny_checkpoint()
    assert not plan_of(source.directory, allow_incomplete=True).is_incomplete
    for suffix in (".weight", ".weight_scale_inv"):
        source.remove(EXPERT + suffix)
    source.write()
    with pytest.raises(SourceError):
        plan_of(source.directory)
    assert plan_of(source.directory, allow_incomplete=True).is_incomplete
