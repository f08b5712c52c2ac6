"""Static activation scales of w4afp8: from the largest inputs, in BF16, as SGLang's loader holds them."""

import json

import pytest
import torch
from safetensors.torch import save_file

from quantkit.errors import RecipeError, SourceError
from quantkit.plan.input_scales import read_input_scales
from tests.cli.test_commands import run
from tests.convert.helpers import convert, load_output

LAYER = "model.layers.1.mlp.experts"
LAYERS = {LAYER, "model.layers.2.mlp.experts"}


def statistics(path, layers=(1,), skip=()):
    """Largest inputs of every channel; expert 3 saw no token."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for layer in layers:
        for expert in range(3):
            for leaf, width in (("gate_proj", 256), ("up_proj", 256), ("down_proj", 128)):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{leaf}.input_absmax"
                if leaf not in skip:
                    tensors[name] = torch.rand(width, generator=generator) * (expert + 1)
    tensors["model.layers.0.mlp.down_proj.input_absmax"] = torch.ones(4)  # no expert
    save_file(tensors, path)
    return tensors


def largest(tensors, leaves):
    return max(
        float(one.max()) for name, one in tensors.items() if ".experts." in name and name.split(".")[-2] in leaves
    )


def test_all_experts_of_a_layer_get_the_same_two(tiny_checkpoint, tmp_path):
    tensors = statistics(tmp_path / "stats.safetensors")
    source = tiny_checkpoint().directory
    command = ("convert", source, "--to", "int4", "--format", "w4afp8", "--stats", tmp_path / "stats.safetensors")
    made = run(*command, "-o", tmp_path / "w4")
    assert made.returncode == 0, made.stderr
    after = load_output(tmp_path / "w4")
    scales = {name: one for name, one in after.items() if name.endswith(".input_scale")}
    assert len(scales) == 4 * 3
    assert {(one.dtype, one.shape) for one in scales.values()} == {(torch.bfloat16, torch.Size([]))}
    for leaves in (("gate_proj", "up_proj"), ("down_proj",)):
        found = {float(one) for name, one in scales.items() if name.split(".")[-2] in leaves}
        wanted = largest(tensors, leaves) / 448
        (value,) = found
        assert wanted <= value <= wanted * (1 + 2**-7)
        assert float(torch.tensor(value).to(torch.bfloat16)) == value
    assert run("verify", tmp_path / "w4", "--source", source, "--engine", "sglang").returncode == 0
    manifest = json.loads((tmp_path / "w4" / "conversion.json").read_text())
    assert list(manifest["recipe"]["input_scales"]) == [LAYER]
    convert(source, tmp_path / "plain", layout="w4afp8")
    plain = load_output(tmp_path / "plain")
    assert all(
        torch.equal(after[name].view(torch.uint8), one.view(torch.uint8)) for name, one in plain.items() if one.ndim
    )


def test_the_loader_of_sglang_takes_them(tiny_checkpoint, tmp_path):
    """Its rule: the scale of up may not differ from that of gate, which is held in BF16 by then, by more than 1e-5."""
    tensors = statistics(tmp_path / "stats.safetensors")
    scales = read_input_scales(tmp_path / "stats.safetensors", LAYERS, 4)
    ((_, down),) = scales.values()
    assert largest(tensors, ("down_proj",)) / 448 <= down
    source = tiny_checkpoint().directory
    convert(source, tmp_path / "w4", layout="w4afp8", input_scales={name: list(one) for name, one in scales.items()})
    stored = load_output(tmp_path / "w4")
    for expert in range(4):
        held = torch.ones((), dtype=torch.bfloat16)
        held.copy_(stored[f"{LAYER}.{expert}.gate_proj.input_scale"].float())
        assert held != 1
        assert (held - stored[f"{LAYER}.{expert}.up_proj.input_scale"].float()).abs() <= 1e-5


def test_a_layer_without_statistics_is_refused(tiny_checkpoint, tmp_path):
    statistics(tmp_path / "stats.safetensors")
    source = tiny_checkpoint(mtp=True).directory  # whose draft, layer 2, they do not know
    scales = read_input_scales(tmp_path / "stats.safetensors", LAYERS, 4)
    with pytest.raises(RecipeError, match="nothing of this layer"):
        convert(
            source, tmp_path / "w4", layout="w4afp8", input_scales={name: list(one) for name, one in scales.items()}
        )
    refused = run("plan", source, "--stats", tmp_path / "stats.safetensors")
    assert refused.returncode == 2
    assert "of w4afp8 alone" in refused.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one.fill_(float("nan")), "NaN"),
        (lambda one: one.neg_(), "less than 0"),
        (lambda one: one.double(), "is not F32"),
        (lambda one: one * 1e8, "which no input is"),
        (lambda one: one * 1e-8, "which no input is"),
    ],
)
def test_bad_statistics_are_named(change, words, tmp_path):
    tensors = statistics(tmp_path / "stats.safetensors")
    name = f"{LAYER}.1.up_proj.input_absmax"
    save_file(tensors | {name: change(tensors[name].clone())}, tmp_path / "stats.safetensors")
    with pytest.raises(SourceError, match=words) as caught:
        read_input_scales(tmp_path / "stats.safetensors", LAYERS, 4)
    assert caught.value.tensor == name


@pytest.mark.parametrize("module", [f"{LAYER}.0.w2", f"{LAYER}.4.down_proj", "model.layers.7.mlp.experts.0.up_proj"])
def test_statistics_of_another_model_are_refused(module, tmp_path):
    name = f"{module}.input_absmax"
    save_file(statistics(tmp_path / "stats.safetensors") | {name: torch.ones(4)}, tmp_path / "stats.safetensors")
    with pytest.raises(SourceError, match="no expert's projection of this checkpoint") as caught:
        read_input_scales(tmp_path / "stats.safetensors", LAYERS, 4)
    assert caught.value.tensor == name


def test_statistics_of_nothing_are_refused(tmp_path):
    statistics(tmp_path / "none.safetensors", layers=())
    with pytest.raises(SourceError, match=r"holds no MODULE\.input_absmax of experts"):
        read_input_scales(tmp_path / "none.safetensors", LAYERS, 4)
    statistics(tmp_path / "half.safetensors", skip=("down_proj",))
    with pytest.raises(SourceError, match="no input of its experts above 0"):
        read_input_scales(tmp_path / "half.safetensors", LAYERS, 4)
