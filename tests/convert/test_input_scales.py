"""Static activation scales of w4afp8: from the largest inputs, in BF16, as SGLang's loader holds them."""

import json

import pytest
import torch
from safetensors.torch import save_file

from quantkit.errors import RecipeError, SourceError
from quantkit.plan.input_scales import read_input_scales
from tests.cli.test_commands import run
from tests.convert.helpers import convert, load_output
from tests.convert.plans import fingerprint

LAYER = "model.layers.1.mlp.experts"
LEAVES = ("up_proj", "down_proj")
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


def stacked(path, source, changes=None):
    """The same numbers as quantkit calibrate writes them: all experts of a layer in one tensor, gate and up too."""
    single = statistics(path)
    rows = {leaf: [single.get(f"{LAYER}.{expert}.{leaf}.input_absmax") for expert in range(4)] for leaf in LEAVES}
    zeros = {"up_proj": torch.zeros(256), "down_proj": torch.zeros(128)}
    tensors = {
        f"{LAYER}.{name}.input_absmax": torch.stack([zeros[leaf] if row is None else row for row in rows[leaf]])
        for name, leaf in (("gate_up_proj", "up_proj"), ("down_proj", "down_proj"))
    }
    save_file(tensors | (changes or {}), path, {"quantkit_statistics": "1", "model": fingerprint(source)})
    return single


def test_statistics_of_this_tool_give_the_scales_of_single_tensors(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint().directory
    single = stacked(tmp_path / "stats.safetensors", source)
    ((gate_up, down),) = read_input_scales(tmp_path / "stats.safetensors", LAYERS, 4).values()
    save_file({name: one for name, one in single.items() if "gate_proj" not in name}, tmp_path / "single.safetensors")
    assert list(read_input_scales(tmp_path / "single.safetensors", LAYERS, 4).values()) == [(gate_up, down)]
    assert largest(single, ("up_proj",)) / 448 <= gate_up <= largest(single, ("up_proj",)) / 448 * (1 + 2**-7)
    command = ("convert", source, "--format", "w4afp8", "--stats", tmp_path / "stats.safetensors", "-q")
    made = run(*command, "-o", tmp_path / "w4")
    assert made.returncode == 0, made.stderr
    scales = [one for name, one in load_output(tmp_path / "w4").items() if name.endswith("down_proj.input_scale")]
    assert [float(one) for one in scales] == [down] * 4


def test_statistics_of_another_revision_are_refused(tiny_checkpoint, tmp_path):
    source = tiny_checkpoint()
    stacked(tmp_path / "stats.safetensors", source.directory)
    source.tensor("model.layers.0.input_layernorm.weight")[3] += 1
    source.write()
    command = ("convert", source.directory, "--format", "w4afp8", "--stats", tmp_path / "stats.safetensors")
    refused = run(*command, "-o", tmp_path / "w4")
    assert refused.returncode == 3
    assert "made from another model or revision" in refused.stderr
    assert not (tmp_path / "w4").exists()


@pytest.mark.parametrize("shape", [(5, 128), (128,), (2, 2, 128)])
def test_experts_that_there_are_not_are_refused(shape, tiny_checkpoint, tmp_path):
    name = f"{LAYER}.down_proj.input_absmax"
    stacked(tmp_path / "stats.safetensors", tiny_checkpoint().directory, {name: torch.ones(shape)})
    with pytest.raises(SourceError, match="no expert's projection of this checkpoint") as caught:
        read_input_scales(tmp_path / "stats.safetensors", LAYERS, 4)
    assert caught.value.tensor == name


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
