"""Asymmetric INT4: as compressed-tensors decodes it, the same bytes by every way, and for vLLM alone."""

import json

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from quantkit.convert.local import Share, execute
from quantkit.errors import RecipeError
from quantkit.transcode import kernels
from tests.cli.test_commands import run
from tests.convert.helpers import convert, directory_bytes, load_output
from tests.convert.plans import plan_of

EXPERT = "model.layers.1.mlp.experts.2.down_proj"


def arguments(group_size):
    return QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=group_size)


def decoded(directory, group_size=32):
    """Every INT4 weight of an output, by the library."""
    tensors = load_output(directory)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments(group_size), format="pack-quantized")
    modules = {name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")}
    return {
        f"{module}.weight": PackedQuantizationCompressor.decompress(
            {name.rpartition(".")[2]: one for name, one in tensors.items() if name.rpartition(".")[0] == module},
            scheme,
        )["weight"].float()
        for module in modules
    }


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_the_library_decodes_weights_closer_than_symmetric_ones(group_size, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(config_changes={"moe_intermediate_size": 128})
    report = convert(source.directory, tmp_path / "out", zero_points=True, group_size=group_size, engine="vllm")
    weights = decoded(tmp_path / "out", group_size)
    assert weights
    errors = {name: (one - source.decoded[name]).norm() / source.decoded[name].norm() for name, one in weights.items()}
    assert max(errors.values()) < {32: 0.085, 64: 0.095, 128: 0.105}[group_size]
    symmetric = convert(source.directory, tmp_path / "symmetric", group_size=group_size, signed_scales=False)
    assert report.classes[0].relative < symmetric.classes[0].relative


def test_absmax_is_the_librarys_own(tiny_checkpoint, tmp_path):
    """Codes, scales and zero points of min and max, byte for byte."""
    source = tiny_checkpoint(source_format="bf16")
    convert(source.directory, tmp_path / "out", zero_points=True, scales="absmax", engine="vllm")
    after, args = load_output(tmp_path / "out"), arguments(32)
    weight = source.decoded[f"{EXPERT}.weight"].to(torch.bfloat16)
    groups = weight.reshape(weight.shape[0], -1, 32)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    packed = PackedQuantizationCompressor.compress(
        {"weight": weight, "weight_scale": scale, "weight_zero_point": zero},
        QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized"),
    )
    for leaf in ("weight_packed", "weight_scale", "weight_zero_point"):
        assert torch.equal(after[f"{EXPERT}.{leaf}"], packed[leaf]), leaf


@pytest.mark.parametrize("scales", ["search", "absmax"])
@pytest.mark.parametrize("form", ["fp8_block", "fp8_channel", "bf16", "f16"])
def test_every_way_gives_the_bytes_of_the_specification(form, scales, tiny_checkpoint, tmp_path, monkeypatch):
    source = tiny_checkpoint(source_format=form)
    changes = {"zero_points": True, "scales": scales, "engine": "vllm"}
    convert(source.directory, tmp_path / "fused", **changes)
    plan = plan_of(source.directory, **changes)
    (tmp_path / "blocks").mkdir()
    execute(plan, Share(directory=tmp_path / "blocks"), num_jobs=2, task_bytes=1 << 10)
    monkeypatch.setattr(kernels, "FUSED_CPU", {})
    convert(source.directory, tmp_path / "composed", **changes)
    whole = directory_bytes(tmp_path / "fused")
    assert directory_bytes(tmp_path / "composed") == whole
    for name, content in directory_bytes(tmp_path / "blocks").items():
        assert whole[name] == content, name


def test_vllm_loads_it_and_sglang_does_not(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(mtp=True).directory
    refused = run("convert", source, "--to", "int4", "--zero-points", "--engine", "sglang", "-o", tmp_path / "out")
    assert refused.returncode == 4
    assert "asymmetric experts" in refused.stderr
    made = run("convert", source, "--to", "int4", "--zero-points", "--engine", "vllm", "-o", tmp_path / "out")
    assert made.returncode == 0, made.stderr
    assert run("verify", tmp_path / "out", "--source", source, "--engine", "vllm").returncode == 0
    assert run("verify", tmp_path / "out", "--engine", "sglang").returncode == 4
    manifest = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert (manifest["recipe"]["zero_points"], manifest["recipe"]["signed_scales"]) == (True, False)
    assert "INT4 with zero points" in (tmp_path / "out" / "README.md").read_text()
    again = run("convert", tmp_path / "out", "--to", "int4", "--engine", "vllm", "-o", tmp_path / "copy")
    assert again.returncode == 0, again.stderr
    for path in (tmp_path / "out").glob("*.safetensors"):
        assert (tmp_path / "copy" / path.name).read_bytes() == path.read_bytes()
    w4afp8 = run("relayout", tmp_path / "out", tmp_path / "w4", "--format", "w4afp8")
    assert w4afp8.returncode == 2


def test_symmetric_codes_do_not_gain_zero_points(tiny_checkpoint):
    source = tiny_checkpoint(model_type="kimi_k2", source_format="int4_native")
    with pytest.raises(RecipeError, match="symmetric INT4 already"):
        plan_of(source.directory, zero_points=True)


def test_rows_that_fill_no_word_stay_as_they_are(tiny_checkpoint):
    source = tiny_checkpoint(config_changes={"q_lora_rank": 100}, source_format="bf16").directory
    targets = (r"re:.*q_a_proj$", r"re:.*kv_a_proj_with_mqa$", r"re:.*experts\.\d+\..*")
    for zero_points in (True, False):
        warnings = plan_of(source, zero_points=zero_points, targets=targets).warnings
        assert any("or words their rows" in one for one in warnings) == zero_points
