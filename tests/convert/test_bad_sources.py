"""Bad input gets a named error with the tensor and the file, and nothing is left behind."""

import json
import os
from pathlib import Path

import pytest
import torch

from quantkit.errors import QuantkitError, RecipeError, ResourceError, SourceError, UsageError
from tests.convert.helpers import convert, directory_bytes, leftovers, load_output, same

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
ATTENTION = "model.layers.0.self_attn.o_proj.weight"


def refuse(source: Path, tmp_path: Path, error: type[QuantkitError] = SourceError, **changes: object) -> QuantkitError:
    """Converting fails with this class; no target is left and nothing half done, the source untouched."""
    before = directory_bytes(source) if source.is_dir() else {}
    siblings = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(error) as caught:
        convert(source, tmp_path / "out", **changes)
    leftovers(tmp_path, siblings)
    assert "\n" not in str(caught.value)
    if before:
        assert directory_bytes(source) == before
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("name", [EXPERT, ATTENTION])
def test_missing_scale(name, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.remove(name + "_scale_inv")
    source.write()
    error = refuse(source.directory, tmp_path)
    assert error.tensor == name
    assert error.file in source.shards


def test_scale_under_an_unknown_name(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(scale_suffix="weight_multiplier")
    assert "scale is missing" in refuse(source.directory, tmp_path).message


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale", "scale"])
def test_scale_without_a_weight(suffix, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(scale_suffix=suffix, write=False)
    source.remove(EXPERT)
    source.write()
    assert refuse(source.directory, tmp_path).tensor == EXPERT.removesuffix("weight") + suffix


def test_scale_of_a_weight_that_is_not_fp8(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.put(EXPERT, torch.zeros(source.tensor(EXPERT).shape, dtype=torch.bfloat16))
    source.write()
    assert "takes none" in refuse(source.directory, tmp_path).message


def test_two_scales_that_disagree(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.put(EXPERT.removesuffix("weight") + "weight_scale", 1 / source.tensor(EXPERT + "_scale_inv"))
    source.write()
    error = refuse(source.directory, tmp_path)
    assert error.tensor == EXPERT
    assert "disagree" in error.message


def test_two_scales_that_agree_are_one(tiny_checkpoint, tmp_path):
    plain = tiny_checkpoint("plain")
    source = tiny_checkpoint("twice", write=False)
    source.put(EXPERT.removesuffix("weight") + "weight_scale", source.tensor(EXPERT + "_scale_inv").clone())
    source.write()
    convert(plain.directory, tmp_path / "a")
    convert(source.directory, tmp_path / "b")
    first, second = load_output(tmp_path / "a"), load_output(tmp_path / "b")
    assert set(first) == set(second)
    assert all(same(first[name], second[name]) for name in first)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("name", [EXPERT, ATTENTION])
def test_nan_code(name, code, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.tensor(name).view(torch.uint8)[3, 17] = code
    source.write()
    error = refuse(source.directory, tmp_path)
    assert error.tensor == name
    assert f"0x{code:02X}" in error.message
    assert "row 3, column 17" in error.message


@pytest.mark.parametrize("value", [0.0, -1e-3, float("nan"), float("inf"), -float("inf"), 1e37])
@pytest.mark.parametrize("name", [EXPERT, ATTENTION])
def test_scale_that_cannot_be_meant(name, value, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.tensor(name + "_scale_inv")[0, -1] = value
    source.write()
    error = refuse(source.directory, tmp_path)
    assert error.tensor == name
    assert "scale" in error.message


def test_e8m0_nan(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(scale_dtype=torch.float8_e8m0fnu, write=False)
    source.tensor(EXPERT + "_scale_inv").view(torch.uint8)[0, 0] = 255
    source.write()
    assert refuse(source.directory, tmp_path).tensor == EXPERT


@pytest.mark.parametrize("form", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_float_that_is_not_finite(form, value, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format=form, write=False)
    source.tensor(EXPERT)[5, 6] = value
    source.write()
    error = refuse(source.directory, tmp_path)
    assert error.tensor == EXPERT
    assert "row 5, column 6" in error.message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_passed_through_weight_that_is_not_finite(value, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.tensor("model.norm.weight")[9] = value
    source.write()
    error = refuse(source.directory, tmp_path)
    assert error.tensor == "model.norm.weight"
    assert error.message == f"holds {value} at [9]"  # the name is said once


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_native_int4_scale_that_cannot_be_meant(value, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="kimi_k2", source_format="int4_native", write=False)
    name = "model.layers.1.mlp.experts.0.up_proj.weight_scale"
    source.tensor(name)[7, 1] = value
    source.write()
    error = refuse(source.directory, tmp_path)
    assert error.tensor == name
    assert error.message.startswith("holds ")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_fp8_stored_as_bytes(dtype, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.put(EXPERT, source.tensor(EXPERT).view(torch.uint8).to(dtype))
    source.write()
    error = refuse(source.directory, tmp_path)
    assert error.tensor == EXPERT
    assert error.exit_code == 3


def test_fp8_without_a_declared_block_size(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    del source.config["quantization_config"]
    source.write()
    assert "block size is unknown" in refuse(source.directory, tmp_path).message


def test_scale_grid_of_another_block_size(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.config["quantization_config"]["weight_block_size"] = [64, 64]
    source.write()
    assert "needs [" in refuse(source.directory, tmp_path).message


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        {"quant_method": "fp8", "weight_block_size": "128"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "compressed-tensors", "config_groups": {}},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float"}}},
        },
        {"bits": 4},
        [],
    ],
)
def test_source_schemes_that_are_not_read(section, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.config["quantization_config"] = section
    source.write()
    refuse(source.directory, tmp_path)


def test_missing_shard(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    name = "model-00002-of-00002.safetensors"
    (source.directory / name).unlink()
    error = refuse(source.directory, tmp_path)
    assert error.file == name
    (source.directory / "model.safetensors.index.json").unlink()
    assert refuse(source.directory, tmp_path).file == name


@pytest.mark.parametrize("change", [-1024, -1, 1, 7])
def test_shard_of_another_length(change, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    path = source.directory / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size + change)
    assert refuse(source.directory, tmp_path).file == path.name


def test_index_and_headers_disagree_both_ways(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    path = source.directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = index["weight_map"]["lm_head.weight"]

    source.write_index({"weight_map": index["weight_map"] | {"mtp.fc.weight": shard}})
    assert refuse(source.directory, tmp_path).tensor == "mtp.fc.weight"

    lacking = dict(index["weight_map"])
    del lacking[EXPERT + "_scale_inv"]
    source.write_index({"weight_map": lacking})
    assert refuse(source.directory, tmp_path).tensor == EXPERT + "_scale_inv"

    other = next(name for name in source.shards if name != shard)
    source.write_index({"weight_map": index["weight_map"] | {"lm_head.weight": other}})
    assert refuse(source.directory, tmp_path).tensor == "lm_head.weight"


def test_extra_shard_outside_the_index(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    (source.directory / "mtp.safetensors").write_bytes((source.directory / next(iter(source.shards))).read_bytes())
    assert refuse(source.directory, tmp_path).file == "mtp.safetensors"


def test_tensor_in_two_shards(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.write(with_index=False)
    first, second = source.shards
    source.shards[second]["lm_head.weight" if "lm_head.weight" in source.shards[first] else EXPERT] = torch.zeros(2, 2)
    name = next(iter(source.shards[first]))
    source.shards[second][name] = source.shards[first][name]
    source.write(with_index=False)
    assert "is also in" in refuse(source.directory, tmp_path).message


@pytest.mark.parametrize(
    "name", ["../../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b.safetensors", "x.bin"]
)
def test_index_that_points_elsewhere(name, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    path = source.directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = name
    source.write_index(index)
    assert refuse(source.directory, tmp_path).file == path.name


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "nul"])
def test_index_that_is_no_index(text, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    (source.directory / "model.safetensors.index.json").write_text(text)
    refuse(source.directory, tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_config_that_is_no_config(text, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    (source.directory / "config.json").write_text(text)
    assert refuse(source.directory, tmp_path).file == "config.json"


def test_config_is_missing(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    (source.directory / "config.json").unlink()
    assert refuse(source.directory, tmp_path).file == "config.json"


def test_weight_that_the_config_promises_is_missing(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.remove(EXPERT)
    source.remove(EXPERT + "_scale_inv")
    source.write()
    assert refuse(source.directory, tmp_path).tensor == EXPERT


def test_shape_that_the_config_contradicts(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(write=False)
    source.config["vocab_size"] = 99
    source.write()
    assert "config.json makes it" in refuse(source.directory, tmp_path).message


def test_only_pickles(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    for path in source.directory.glob("*.safetensors*"):
        path.unlink()
    (source.directory / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    assert "pickles" in refuse(source.directory, tmp_path).remedy


def test_mxfp4_is_refused(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="kimi_k2", source_format="int4_native", write=False)
    name = "model.layers.1.mlp.experts.0.up_proj.weight_packed"
    source.put(name, source.tensor(name).view(torch.uint8))
    source.write()
    error = refuse(source.directory, tmp_path)
    assert "MXFP4" in error.message
    assert error.tensor == name


def test_source_that_is_not_there(tmp_path):
    for source in (tmp_path / "nothing", tmp_path / "a" / "b"):
        assert "is not there" in refuse(source, tmp_path).message


def test_output_exists_or_lies_in_the_source(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    link = tmp_path / "link"
    link.symlink_to(source.directory)
    targets = [source.directory, source.directory / "out", link, link / "out"]
    for target in targets:
        before = directory_bytes(source.directory)
        with pytest.raises(UsageError):
            convert(source.directory, target)
        assert directory_bytes(source.directory) == before
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError):
            convert(source.directory, target)


def test_stray_files_in_an_existing_output_are_not_touched(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model.safetensors").write_bytes(b"stray")
    with pytest.raises(UsageError, match="exists already"):
        convert(source.directory, tmp_path / "old")
    assert directory_bytes(tmp_path / "old") == {"model.safetensors": b"stray"}


def test_partial_directory_that_is_not_ours_is_not_touched(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "precious").write_text("x")
    refuse(source.directory, tmp_path, UsageError)
    assert (tmp_path / "out.partial" / "precious").read_text() == "x"


def test_rules_that_match_nothing_or_too_much(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    assert "matches no weight" in refuse(source.directory, tmp_path, RecipeError, targets=["re:.*no_such"]).message
    assert "matches no weight" in refuse(source.directory, tmp_path, RecipeError, ignore=["no.such.module"]).message
    assert "matches no weight" in refuse(source.directory, tmp_path, RecipeError, targets=["re:.*layernorm"]).message
    for pattern in ("re:.*mlp.gate$", "re:.*kv_b_proj", "lm_head", "re:.*embed_tokens"):
        assert "never INT4" in refuse(source.directory, tmp_path, RecipeError, targets=[pattern]).message
    assert (
        "one module" in refuse(source.directory, tmp_path, RecipeError, ignore=[EXPERT.removesuffix(".weight")]).message
    )
    assert "one module" in refuse(source.directory, tmp_path, RecipeError, targets=["re:.*q_a_proj"]).message
    convert(source.directory, tmp_path / "out", ignore=["no.such.module"], allow_unmatched=True)


def test_unquantized_experts_beside_native_int4_need_the_same_group(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="kimi_k2", source_format="int4_native", write=False)
    module = EXPERT.removesuffix(".weight")
    for leaf in ("weight_packed", "weight_scale", "weight_shape"):
        source.remove(f"{module}.{leaf}")
    source.put(EXPERT, torch.randn(128, 256).to(torch.bfloat16))
    source.write()
    assert "never requantized" in refuse(source.directory, tmp_path, RecipeError, group_size=64).message
    convert(source.directory, tmp_path / "out")
    output = load_output(tmp_path / "out")
    assert output[f"{module}.weight_scale"].shape == (128, 256 // 32)
    native = "model.layers.1.mlp.experts.0.up_proj.weight_packed"
    assert same(output[native], source.tensor(native))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB, where this container allows to mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    if os.system(f"mount -t tmpfs -o size=1m tmpfs {mount} 2>/dev/null") != 0:
        pytest.skip("no mount in this container")
    yield mount
    os.system(f"umount {mount}")


def test_disk_that_is_too_small_is_refused_before_the_work(tiny_checkpoint, small_disk):
    with pytest.raises(ResourceError, match="are free") as caught:
        convert(tiny_checkpoint().directory, small_disk / "out")
    assert caught.value.exit_code == 5
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("is_foreseen", [True, False])
def test_disk_that_fills_up_during_the_work(is_foreseen, tiny_checkpoint, small_disk, monkeypatch):
    monkeypatch.setattr("quantkit.convert.conversion.free_bytes", lambda _: 1 << 50)
    if not is_foreseen:
        monkeypatch.setattr("quantkit.convert.local.free_bytes", lambda _: 1 << 50)
    message = "the shard needs 1.13 MiB and .* are free" if is_foreseen else "No space left"
    with pytest.raises(ResourceError, match=message) as caught:
        convert(tiny_checkpoint().directory, small_disk / "out")
    assert caught.value.exit_code == 5
    leftovers(small_disk, set())


def test_a_shard_whose_name_is_no_text_is_refused(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    (source / "model.safetensors.index.json").unlink()
    for number, path in enumerate(sorted(source.glob("*.safetensors"))):
        path.rename(source / os.fsdecode(b"\xff%d.safetensors" % number))
    assert "no text" in refuse(source, tmp_path).message
