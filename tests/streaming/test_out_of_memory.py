"""Where memory ends, a command says in which layer, expert or weight, and ends with its exit code for that."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quantkit.calibrated import compressor
from quantkit.calibrated.compressor import OneShot
from quantkit.errors import ResourceError
from quantkit.evaluate import run as evaluate_module
from quantkit.evaluate.run import Pair, evaluate
from quantkit.gptq import stream as stream_module
from quantkit.gptq.hessians import HessianSum
from quantkit.gptq.stream import stream_words
from quantkit.streaming import Tokens, open_states
from quantkit.streaming import experts as experts_module
from quantkit.streaming import model as model_module
from tests.cli.inside import refusal
from tests.gptq.test_stream import request
from tests.streaming.models import lively_checkpoint
from tests.streaming.test_forward import IDS, Breaks, opened, streamed_logits

LAYER = "model.layers.1"
EXPERT = r"model\.layers\.1\.mlp\.experts\.\d"
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nof more lines")


def full(*_, **__):
    raise FULL


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return lively_checkpoint(tmp_path_factory.mktemp("lively") / "source", "glm4_moe").directory


def is_named(where):
    return pytest.raises(ResourceError, match=rf"{where}: no memory is left \(CUDA out of memory.*another --device$")


def run_layer(source, **options):
    model = opened(source)
    states = open_states(1, 4, model.hidden_size, dtype=torch.float32)
    states.hidden[:] = model.embed(IDS[0, :4])
    layer = model.layer(1)
    layer.module.self_attn.register_forward_pre_hook(options.pop("hook", lambda *_: None))
    layer.run(states, **options)


@pytest.mark.parametrize(
    ("module", "name", "where"),
    [
        (model_module, "decode_weight", r"model\.layers\.0\.\w+.*weight"),
        (experts_module, "decode_weight", EXPERT),
        (experts_module, "_add_answers", EXPERT),
        (model_module, "decode_rows", r"lm_head\.weight"),
        (model_module.F, "linear", r"model\.layers\.0"),
    ],
)
def test_what_has_no_room_is_named(source, monkeypatch, module, name, where):
    if name == "decode_rows":  # of the head, not the embedding
        embed = opened(source).embed(IDS.reshape(-1))
        monkeypatch.setattr(model_module.StreamedModel, "embed", lambda *_: embed)
    monkeypatch.setattr(module, name, full)
    with is_named(where) as caught:
        streamed_logits(source)
    assert caught.value.exit_code == 5


def test_norm_and_head_are_named(source, monkeypatch):
    model = opened(source)
    monkeypatch.setattr(model.skeleton.model.norm, "forward", full)
    with is_named(r"model\.norm\.weight"):
        model.logits(torch.zeros(2, model.hidden_size))
    monkeypatch.setattr(model_module.StreamedModel, "normed", lambda _, hidden: hidden)
    monkeypatch.setattr(model_module.F, "linear", full)
    with is_named(r"lm_head\.weight"):
        model.logits(torch.zeros(2, model.hidden_size))


def test_a_full_gpu_in_transformers_layer_is_not_the_sources_fault(source):
    with is_named(r"model\.layers\.1"):
        run_layer(source, hook=full)


@pytest.mark.parametrize(("call", "where"), [("linear", r"model\.layers\.1"), ("expert", EXPERT)])
def test_what_an_observer_wants_is_named_too(source, call, where):
    with is_named(where):
        run_layer(source, observer=Breaks(call, FULL))


def test_visits_of_experts_are_named(source):
    with is_named(EXPERT):
        run_layer(source, visit=full)


@pytest.mark.parametrize(
    ("owner", "name", "where"),
    [
        (HessianSum, "add", r"model\.layers\.0"),
        (stream_module, "factorize", r"model\.layers\.0\.self_attn\.q_proj"),
        (stream_module, "quantize_gptq", r"model\.layers\.0\.self_attn\.q_proj"),
    ],
)
def test_gptq_names_the_module(source, tmp_path, monkeypatch, owner, name, where):
    monkeypatch.setattr(owner, name, full)
    with is_named(where):
        stream_words(request(source, tmp_path / "words", dense={"model.layers.0.self_attn.q_proj": (256, 256)}))
    assert not list((tmp_path / "words").glob("*.safetensors*"))


def test_an_evaluation_says_which_checkpoint(source, monkeypatch):
    monkeypatch.setattr(evaluate_module.F, "linear", full)
    with is_named(rf"{source}: model\.layers\.0"):
        evaluate(Pair(opened(source), opened(source)), Tokens(ids_NS=IDS.numpy()), work=None)
    with is_named(rf"{source}: lm_head\.weight"):
        evaluate_module._logits(opened(source), torch.zeros(2, 256), torch.zeros(4, 256))


def test_the_machines_memory_ends_as_well(source):
    """torch has no class of its own for that; what it says is asked of it itself."""
    model = opened(source)
    states = open_states(1, 1 << 50, model.hidden_size, dtype=torch.float32)
    with pytest.raises(ResourceError, match=r"model\.layers\.0: no memory is left .*can't allocate memory"):
        model.layer(0).run(states)


def test_llm_compressor_has_another_remedy(source, monkeypatch):
    import transformers

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    tokens = Tokens(ids_NS=np.zeros((1, 4), np.int64))
    shot = OneShot(directory=source, modules=frozenset(), group_size=32, signed=True, tokens=tokens)
    with pytest.raises(ResourceError, match=r"no memory is left .*; give --streaming"):
        compressor._load(shot)


def test_a_command_ends_with_the_exit_code_for_it(source, tmp_path, monkeypatch):
    save_file({"input_ids": IDS}, tmp_path / "tokens.safetensors")
    monkeypatch.setattr(experts_module, "_add_answers", full)
    tokens = ["--tokens", tmp_path / "tokens.safetensors"]
    error = refusal("calibrate", source, *tokens, "-o", tmp_path / "stats.safetensors", "-q")
    assert (error.exit_code, error.tensor) == (5, f"{LAYER}.mlp.experts.0")
