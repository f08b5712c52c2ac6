"""Checkpoints, models and devices that patch refuses, each with its name; and the dtypes that it loads."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit_kernels.transformers_model import patch
from tests.kernels.checkpoints import build, damaged

pytestmark = pytest.mark.gpu
EXPERTS = "model.layers.1.mlp.experts"
NORM = "model.layers.0.input_layernorm.weight"
CORRECTION = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="session")
def of_family(convert, tmp_path_factory):
    """A converted checkpoint of a family, made once."""
    from tests.tiny import write_checkpoint

    made = {}

    def make(model_type, **changes):
        if model_type not in made:
            directory = tmp_path_factory.mktemp(model_type)
            source = write_checkpoint(directory / "source", model_type=model_type)
            convert(source.directory, directory / "out", **changes)
            made[model_type] = directory / "out"
        return made[model_type]

    return make


@pytest.fixture
def deepseek(of_family):
    return of_family("deepseek_v3")


@pytest.fixture
def in_one_file(deepseek, tmp_path):
    """The checkpoint in model.safetensors, with an index."""
    return damaged(deepseek, tmp_path / "out", lambda *_: None)


@pytest.mark.parametrize("device", [None, {"": None}, "cpu"])
def test_without_a_device_it_goes_to_the_cpu(device, deepseek):
    model = patch(build(deepseek), deepseek, device=device)
    assert {one.device.type for one in [*model.parameters(), *model.buffers()]} == {"cpu"}


def test_without_a_device_it_stays_where_it_is(deepseek, device):
    model = patch(build(deepseek).to_empty(device=device), deepseek)
    assert {one.device.type for one in [*model.parameters(), *model.buffers()]} == {device}


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("meta", "on meta a model has no memory"),
        ({"": "meta"}, "on meta a model has no memory"),
        ("cuda:99", "cannot go to cuda:99: torch sees (no|\\d+) GPU"),
        ({"": "disk"}, "'disk' is no device"),
        ({"": "cpu", "model.layer.0": "cpu"}, "the device map has 'model.layer.0', which the model has not"),
        ({"": "cpu", f"{EXPERTS}.act_fn": "cpu"}, f"the device map has '{EXPERTS}.act_fn', and {EXPERTS} is in one"),
        ({"": "cpu", f"{EXPERTS}.0": "cpu"}, f"the device map has '{EXPERTS}.0', and {EXPERTS} is in one"),
        ({"model": "cpu"}, "the device map has no place for lm_head.weight"),
    ],
)
def test_a_place_that_is_none_is_named(place, words, deepseek):
    with pytest.raises(ValueError, match=words):
        patch(build(deepseek), deepseek, device=place)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_goes_there(deepseek):
    with pytest.raises(ValueError, match="the model cannot go to cuda: torch sees no GPU"):
        patch(build(deepseek), deepseek, device="cuda")


def test_parameters_get_the_dtypes_of_the_model(deepseek, tmp_path):
    """The router's correction stays float32, as transformers' loader has it, whatever the model was built in."""

    def change(tensors, _):
        assert tensors[CORRECTION].dtype == torch.float32
        tensors[NORM] = tensors[NORM].float()

    directory = damaged(deepseek, tmp_path / "out", change)
    for dtype in (torch.bfloat16, torch.float16):
        model = patch(build(deepseek, dtype), directory)
        assert model.get_parameter(NORM).dtype == model.lm_head.weight.dtype == dtype
        got = model.get_buffer(CORRECTION)
        assert got.dtype == torch.float32
        assert torch.equal(got, load_file(directory / "model.safetensors")[CORRECTION])
    with pytest.raises(ValueError, match=r"is torch.float32: build the model in BF16 or FP16"):
        patch(build(deepseek, torch.float32), directory)


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (torch.int32, f"{NORM} is torch.int32, the model wants torch.bfloat16"),
        (torch.float8_e4m3fn, f"{NORM} is torch.float8_e4m3fn, and patch takes no FP8 weights: convert with --rest"),
    ],
)
def test_numbers_that_mean_something_else_are_refused(dtype, words, deepseek, tmp_path):
    directory = damaged(deepseek, tmp_path / "out", lambda tensors, _: tensors.update({NORM: tensors[NORM].to(dtype)}))
    with pytest.raises(ValueError, match=words):
        patch(build(deepseek), directory)


def test_fp8_beside_int4_is_refused(convert, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="deepseek_v3")
    convert(source.directory, tmp_path / "out", rest="fp8")
    with pytest.raises(ValueError, match=r"config.json: it has FP8 weights, which patch does not take: convert with"):
        patch(build(tmp_path / "out"), tmp_path / "out")


@pytest.mark.parametrize("family", ["glm4_moe_lite", "qwen3_moe"])
def test_a_family_that_is_not_known_is_named(family, of_family):
    directory = of_family(family)
    with pytest.raises(ValueError, match=rf"{EXPERTS} is \w+Experts, and patch takes the experts GlmMoeDsaExperts, "):
        patch(build(directory), directory)


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), None])
def test_a_model_that_is_none_is_named(model, tmp_path):
    with pytest.raises(ValueError, match=f"patch takes a model of transformers, not {type(model).__name__}"):
        patch(model, tmp_path)


def test_a_model_is_patched_once(deepseek):
    with pytest.raises(ValueError, match=f"{EXPERTS} is Int4Experts: the model is patched already"):
        patch(patch(build(deepseek), deepseek), deepseek)


def test_experts_that_are_not_in_int4_are_named(deepseek, tmp_path):
    def change(tensors, _):
        for name in [name for name in tensors if name.startswith(EXPERTS)]:
            del tensors[name]
        tensors[f"{EXPERTS}.0.gate_proj.weight"] = torch.zeros((128, 256), dtype=torch.bfloat16)

    with pytest.raises(ValueError, match=f"{EXPERTS}: the checkpoint has no experts in INT4"):
        patch(build(deepseek), damaged(deepseek, tmp_path / "out", change))


def test_more_experts_than_the_model_has_are_named(deepseek, tmp_path):
    name = f"{EXPERTS}.9.up_proj.weight_scale"
    directory = damaged(deepseek, tmp_path / "out", lambda tensors, _: tensors.update({name: torch.zeros(1)}))
    with pytest.raises(ValueError, match=f"{name} is in the checkpoint, and nothing here takes it"):
        patch(build(deepseek), directory)


def test_a_single_file_needs_no_index(in_one_file, deepseek):
    (in_one_file / "model.safetensors.index.json").unlink()
    got, expected = patch(build(deepseek), in_one_file).state_dict(), patch(build(deepseek), deepseek).state_dict()
    assert all(torch.equal(got[name], one) for name, one in expected.items())


def write(text):
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("model.safetensors.index.json", write("{"), "cannot be read: "),
        ("model.safetensors.index.json", write("[]"), "is no JSON object"),
        ("model.safetensors.index.json", write('{"weight_map": 3}'), "has no weight_map of names to files"),
        *(
            (
                "model.safetensors.index.json",
                write(json.dumps({"weight_map": {"lm_head.weight": file}})),
                f"puts lm_head.weight into '{file}', which is no file beside it",
            )
            for file in ("../x", "/x", "..", "")
        ),
        ("config.json", lambda path: path.unlink(), "cannot be read: "),
        ("config.json", write("{"), "cannot be read: "),
        ("config.json", write('{"quantization_config": null}'), "names no single INT4 group size"),
        ("config.json", write('{"quantization_config": {"config_groups": []}}'), "names no single INT4 group size"),
        (
            "config.json",
            write('{"quantization_config": {"config_groups": {"a": {"weights": {"num_bits": 4}}}}}'),
            "names no single INT4 group size",
        ),
        ("model.safetensors", lambda path: path.unlink(), "cannot be read: "),
        ("model.safetensors", lambda path: path.write_bytes(path.read_bytes()[:100]), "cannot be read: "),
        ("model.safetensors", lambda path: save_file({"a": torch.zeros(1)}, path), "does not give model"),
    ],
)
def test_a_file_that_is_broken_is_named(file, change, words, in_one_file, deepseek):
    model = build(deepseek)
    change(in_one_file / file)
    with pytest.raises(ValueError, match=re.escape(str(in_one_file / file)) + ".*" + re.escape(words)):
        patch(model, in_one_file)


def test_a_bias_of_another_shape_is_named(convert, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="glm4_moe")
    convert(source.directory, tmp_path / "out", targets=("re:.*[qkv]_proj", "re:.*mlp.experts.*_proj"))
    name = "model.layers.0.self_attn.q_proj"

    def change(tensors, _):
        tensors[f"{name}.bias"] = tensors[f"{name}.bias"][:-1].contiguous()

    with pytest.raises(ValueError, match=rf"{name}: the bias is floats \[256\], not torch.bfloat16 \(255,\)"):
        patch(build(tmp_path / "out"), damaged(tmp_path / "out", tmp_path / "short", change))
