"""INT4 sources that do not hold together: a named error with a remedy, and never an output that is wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.source import open_checkpoint
from quantkit.errors import QuantkitError, RecipeError, SourceError
from quantkit.plan.relayout import native_settings
from quantkit.verify.verify import verify_output
from tests.classic import make_classic
from tests.convert.helpers import convert, load_output
from tests.convert.plans import plan_of
from tests.tiny import TinyCheckpoint

EXPERT = "model.layers.1.mlp.experts.2"


def opened(directory):
    """A checkpoint that can be changed, of one that is there."""
    shards = {path.name: load_file(path) for path in sorted(directory.glob("*.safetensors"))}
    config = json.loads((directory / "config.json").read_text())
    (directory / "conversion.json").unlink(missing_ok=True)
    return TinyCheckpoint(directory, config, {}, shards)


def w4afp8(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint(mtp=True).directory, tmp_path / "w4", layout="w4afp8")
    return opened(tmp_path / "w4")


def moved(source, target, **settings):
    return convert(source, target, **native_settings(open_checkpoint(source), {"rules": [], **settings}))


def test_an_activation_scale_under_both_names_is_refused(tiny_checkpoint, tmp_path):
    source = w4afp8(tiny_checkpoint, tmp_path)
    source.put(f"{EXPERT}.gate_proj.input_scale", torch.tensor(9.0))
    source.put(f"{EXPERT}.w1.input_scale", torch.tensor(2.0))
    source.write()
    with pytest.raises(SourceError, match=r"is also there as .*w1\.input_scale"):
        moved(source.directory, tmp_path / "out", layout="w4afp8")


@pytest.mark.parametrize(
    "scale",
    [torch.tensor(0.0), torch.tensor(-1.0), torch.tensor(float("nan")), torch.ones(2), torch.ones(()).long()],
)
def test_activation_scales_that_cannot_be_meant(scale, tiny_checkpoint, tmp_path):
    source = w4afp8(tiny_checkpoint, tmp_path)
    source.put(f"{EXPERT}.down_proj.input_scale", scale)
    source.write()
    with pytest.raises(SourceError, match="input_scale") as caught:
        moved(source.directory, tmp_path / "out", layout="w4afp8")
    assert f"{EXPERT}.down_proj" in str(caught.value)


@pytest.mark.parametrize("shape", [(0, 256), (8, 0), (0, 0)])
@pytest.mark.parametrize("layout", ["w4afp8", "compressed-tensors"])
def test_weights_of_nothing_are_moved_and_verified(shape, layout, tmp_path):
    directory, name = tmp_path / "source", "model.layers.0.mlp.experts.0.down_proj"
    directory.mkdir()
    tensors = {
        f"{name}.weight": torch.zeros(shape[0], shape[1] // 2, dtype=torch.int8),
        f"{name}.weight_scale_inv": torch.zeros(shape[0], shape[1] // 128).bfloat16(),
        "model.embed_tokens.weight": torch.randn(8, 8).bfloat16(),
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text('{"model_type": "mine", "quantization_config": {"quant_method": "w4afp8"}}')
    moved(directory, tmp_path / "out", layout=layout)
    report = verify_output(tmp_path / "out", source=open_checkpoint(directory))
    assert report.is_good, report.first_error()


@pytest.mark.parametrize("changes", [{}, {"zero_points": True}, {"layout": "compressed-tensors", "rest": "fp8"}])
def test_a_weight_without_columns_is_converted_and_verified(changes, tmp_path):
    directory = tmp_path / "source"
    directory.mkdir()
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    save_file(
        {name: torch.zeros(8, 0).bfloat16(), "other.weight": torch.ones(8).bfloat16()}, directory / "m.safetensors"
    )
    (directory / "config.json").write_text('{"model_type": "mine"}')
    convert(directory, tmp_path / "out", **changes)
    report = verify_output(tmp_path / "out", source=open_checkpoint(directory))
    assert report.is_good, report.first_error()


def test_experts_that_w4afp8_has_no_form_for_are_refused_before_the_work(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(mtp=True).directory
    convert(source, tmp_path / "made", group_size=128, signed_scales=False, rest="fp8-native", mtp="bf16")
    with pytest.raises(RecipeError, match="w4afp8 makes every one of them INT4") as caught:
        plan_of(
            tmp_path / "made", **native_settings(open_checkpoint(tmp_path / "made"), {"layout": "w4afp8", "rules": []})
        )
    assert caught.value.tensor.startswith("model.layers.2.")
    moved(tmp_path / "made", tmp_path / "w4", layout="w4afp8", mtp="drop")


def test_a_section_that_forgets_plain_experts_is_written_anew(tiny_checkpoint, tmp_path):
    """INT4 experts and a draft that was put back in BF16, which the source's own ignore list does not name."""
    source = tiny_checkpoint(mtp=True).directory
    convert(source, tmp_path / "made", mtp="bf16")
    made = opened(tmp_path / "made")
    section = made.config["quantization_config"]
    named = [entry for entry in section["ignore"] if r"decoder)\.mlp\.experts" in entry]
    assert named
    section["ignore"] = [entry for entry in section["ignore"] if entry not in named]
    made.write()
    moved(made.directory, tmp_path / "out", layout="compressed-tensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert set(section["ignore"]) < set(config["quantization_config"]["ignore"])
    assert set(load_output(tmp_path / "out")) == {name for tensors in made.shards.values() for name in tensors}


def test_reordered_columns_without_their_order_are_refused(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format="bf16")
    make_classic(source, "gptq")
    source.config["quantization_config"]["desc_act"] = True
    source.write()
    moved(source.directory, tmp_path / "with")
    for tensors in source.shards.values():
        for name in [name for name in tensors if name.endswith(".g_idx")]:
            del tensors[name]
    source.write()
    with pytest.raises(SourceError, match="and no g_idx"):
        moved(source.directory, tmp_path / "without")


@pytest.mark.parametrize(
    ("layout", "key", "values"),
    [
        ("awq", "zero_point", (0, "false", "", [], {}, -1)),
        ("awq", "version", (0, [], {}, "")),
        ("gptq", "checkpoint_format", ([], {}, 0, False, "")),
        ("gptq", "desc_act", ("x", [], 1e30, 0)),
        ("gptq", "sym", (0, "true", [])),
        ("gptq", "bits", ("4", 4.5, [], None)),
        ("gptq", "group_size", ("32", True, 0, 32.5)),
        ("auto_round:auto_gptq", "act_bits", (8, "16")),
    ],
)
def test_values_of_another_type_are_named(layout, key, values, tiny_checkpoint):
    source = tiny_checkpoint(source_format="bf16")
    make_classic(source, layout)
    for value in values:
        source.config["quantization_config"][key] = value
        source.write_config()
        with pytest.raises(QuantkitError) as caught:
            plan_of(source.directory)
        assert isinstance(caught.value, SourceError), value
        assert "quantization_config" in caught.value.message


def test_gptq_rules_that_only_skip_modules_are_read(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(source_format="bf16")
    make_classic(source, "gptq")
    source.config["quantization_config"]["dynamic"] = {"-:.*self_attn.*": {}, "-:.*shared_experts.*": {}}
    source.write_config()
    moved(source.directory, tmp_path / "out")
    source.config["quantization_config"]["dynamic"] = {"+:.*down_proj": {"bits": 8}}
    source.write_config()
    with pytest.raises(SourceError, match="settings of its own"):
        plan_of(source.directory)


def test_verification_against_another_source_says_so_and_no_more(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint().directory, tmp_path / "out")
    other = tiny_checkpoint(name="other", seed=1).directory
    report = verify_output(tmp_path / "out", source=open_checkpoint(other))
    assert {finding.check for finding in report.findings} == {"source"}
