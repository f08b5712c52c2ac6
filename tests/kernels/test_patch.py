"""A converted checkpoint runs in transformers' own model with its experts in INT4.

Compared with the same model of transformers, loaded by transformers and decompressed by compressed-tensors.
"""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from quantkit_kernels.checkpoint import group_size_of
from quantkit_kernels.modules import Int4Experts, Int4Linear
from quantkit_kernels.transformers_model import _Places, patch
from tests.kernels.checkpoints import build, damaged
from tests.kernels.compare import relative_mean

pytestmark = pytest.mark.gpu


@torch.no_grad()
def logits_of(model, tokens):
    return model(tokens).logits.float().cpu()


def test_it_says_what_the_decompressed_model_says(converted, device):
    from transformers import AutoModelForCausalLM

    model = patch(build(converted), converted, device=device)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    experts = [module for module in model.modules() if isinstance(module, Int4Experts)]
    assert len(experts) == 1
    tokens = torch.arange(1, 24).unsqueeze(0).to(device)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(converted, dtype=torch.bfloat16).to(device), tokens)
    got = logits_of(model, tokens)
    # both compute in BF16: each of some ten roundings on the way is 2**-9 at most
    assert relative_mean(expected, got) < 0.02
    assert relative_mean(expected, logits_of(model, tokens + 1)) > 0.2


def halves(devices):
    """The first layer here, the rest there, as accelerate writes it."""
    first, second = devices
    return {"model.embed_tokens": first, "model.layers.0": first, "model.rotary_emb": first, "": second}


def test_a_device_map_places_every_module(converted, device):
    """With two GPUs they differ; without, the hooks of accelerate move nothing."""
    devices = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else [device] * 2
    model = patch(build(converted), converted, device=halves(devices))
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    for name, tensor in model.named_parameters():
        first = name.startswith(("model.embed_tokens", "model.layers.0"))
        assert tensor.device == torch.empty(0, device=devices[not first]).device, name
    assert hasattr(model.get_submodule("model.layers.0"), "_hf_hook")
    tokens = torch.arange(1, 24).unsqueeze(0).to(devices[0])
    assert torch.equal(
        logits_of(patch(build(converted), converted, device=devices[0]), tokens), logits_of(model, tokens)
    )


def test_the_longest_name_in_a_map_decides():
    places = _Places({"": "cpu", "model.layers.1": "meta", "model.layers.1.mlp": "cuda:1"})
    names = ("lm_head", "model.layers.1.self_attn", "model.layers.1.mlp.experts", "model.layers.10")
    assert [places.of(name) for name in names] == ["cpu", "meta", "cuda:1", "cpu"]
    with pytest.raises(ValueError, match="no place for lm_head"):
        _Places({"model": "cpu"}).of("lm_head")


def test_experts_are_those_of_the_checkpoint(converted, device):
    model = patch(build(converted), converted, device=device)
    name = "model.layers.1.mlp.experts."
    stored = {}
    for shard in converted.glob("*.safetensors"):
        stored |= {key: one for key, one in load_file(shard).items() if key.startswith(name)}
    own = model.get_submodule(name.removesuffix(".")).state_dict()
    assert {name + key for key in own} == set(stored)
    for key, tensor in own.items():
        assert torch.equal(tensor.cpu().view(torch.uint8), stored[name + key].view(torch.uint8)), key


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.1.mlp.experts.2.up_proj.weight_scale", "is not in the checkpoint"),
        ("model.layers.0.input_layernorm.weight", "is not in the checkpoint"),
    ],
)
def test_a_tensor_that_is_missing_is_named(name, words, converted, tmp_path, device):
    directory = damaged(converted, tmp_path / "out", lambda tensors, _: tensors.pop(name))
    with pytest.raises(ValueError, match=f"{name} {words}"):
        patch(build(converted), directory, device=device)


def test_a_shape_that_is_not_the_models_is_named(converted, tmp_path, device):
    name = "model.layers.1.mlp.experts.0.down_proj"

    def change(tensors, _):
        tensors[name + ".weight_packed"] = tensors[name + ".weight_packed"][:-1].contiguous()

    directory = damaged(converted, tmp_path / "out", change)
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.experts.0: a weight \(256, 128\) in groups of 32"):
        patch(build(converted), directory, device=device)


def test_what_is_not_converted_is_refused(converted, tmp_path, device):
    with pytest.raises(ValueError, match="this is no converted checkpoint"):
        patch(build(converted), tmp_path, device=device)
    directory = damaged(converted, tmp_path / "out", lambda _, config: config.pop("quantization_config"))
    with pytest.raises(ValueError, match="names no single INT4 group size"):
        patch(build(converted), directory, device=device)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"symmetric": False}, "symmetric False, and the kernels are for True"),
        ({"actorder": "group"}, "actorder 'group'"),
        ({"strategy": "channel"}, "strategy 'channel'"),
        ({"num_bits": 8}, "num_bits 8"),
        ({"type": "float"}, "type 'float'"),
        ({"format": "int-quantized"}, "format 'int-quantized', and the kernels are for 'pack-quantized'"),
        ({"format": None, "of_all": "marlin-24"}, "format 'marlin-24'"),
        ({"input_activations": {"num_bits": 8}}, "input_activations {'num_bits': 8}"),
    ],
)
def test_weights_that_mean_something_else_are_refused(change, words, tmp_path):
    """Each would load, and compute something else."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    group = {"weights": weights, "format": "pack-quantized", "input_activations": None, "targets": ["Linear"]}
    for key, value in change.items():
        if key != "of_all":
            (group if key in group else weights)[key] = value
    section = {"config_groups": {"group_0": group}, "format": change.get("of_all", "pack-quantized")}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"quantization_config": section}))
    with pytest.raises(ValueError, match=f"config.json: group_0 has {words}"):
        group_size_of(path)
    path.write_text(json.dumps({"quantization_config": section | {"config_groups": {"group_0": group, "b": {}}}}))
    with pytest.raises(ValueError, match="no single INT4 group size"):
        group_size_of(path)


@pytest.mark.parametrize("name", ["experts.0.up_proj.weight_zero_point", "experts.2.up_proj.weight_g_idx"])
def test_a_tensor_that_nothing_takes_is_named(name, converted, tmp_path, device):
    name = f"model.layers.1.mlp.{name}"
    directory = damaged(converted, tmp_path / "out", lambda tensors, _: tensors.update({name: torch.zeros(1)}))
    with pytest.raises(ValueError, match=f"{name} is in the checkpoint, and nothing here takes it"):
        patch(build(converted), directory, device=device)


def test_without_safetensors_the_package_is_imported():
    code = "import sys; sys.modules['safetensors'] = None; import quantkit_kernels; assert quantkit_kernels.patch"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_linear_layers_in_int4_become_int4_linears(convert, tiny_checkpoint, tmp_path, device):
    """A dense projection that the recipe was told to quantize as well."""
    source = tiny_checkpoint(model_type="glm4_moe")
    convert(source.directory, tmp_path / "out", targets=("re:.*mlp.*_proj",))
    model = patch(build(tmp_path / "out"), tmp_path / "out", device=device)
    linears = [name for name, module in model.named_modules() if isinstance(module, Int4Linear)]
    assert "model.layers.0.mlp.gate_proj" in linears
    assert logits_of(model, torch.arange(1, 9).unsqueeze(0).to(device)).isfinite().all()
    name = "model.layers.0.mlp.gate_proj.weight"
    directory = damaged(tmp_path / "out", tmp_path / "twice", lambda tensors, _: tensors.update({name: torch.zeros(1)}))
    with pytest.raises(ValueError, match=f"{name} is in the checkpoint"):
        patch(build(directory), directory, device=device)
