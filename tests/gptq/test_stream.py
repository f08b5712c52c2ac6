"""GPTQ layer by layer against GPTQ of the whole model in memory, written here with hooks alone."""

import numpy as np
import pytest
import torch

from quantkit.gptq.factor import factorize
from quantkit.gptq.quantize import quantize_gptq
from quantkit.gptq.stream import StreamRequest, stream_words, values_of
from quantkit.numerics.packing import unpack_int4
from quantkit.streaming import Tokens
from quantkit.words import finish_words, open_words
from tests.streaming.models import lively_checkpoint, whole_model
from tests.streaming.test_forward import opened
from tests.tiny import EXPERTS, HIDDEN, WIDTH

IDS = torch.randint(0, 128, (12, 24), generator=torch.Generator().manual_seed(5))
GROUP = 32


def request(directory, words, model_type="glm_moe_dsa", dense=()):
    words.mkdir(exist_ok=True)
    prefix = "model.layers.1.mlp.experts"
    shapes = {f"{prefix}.{e}.{leaf}": (WIDTH, HIDDEN) for e in range(EXPERTS) for leaf in ("gate_proj", "up_proj")}
    shapes |= {f"{prefix}.{e}.down_proj": (HIDDEN, WIDTH) for e in range(EXPERTS)}
    return StreamRequest(
        model=opened(directory),
        tokens=Tokens(ids_NS=IDS.numpy()),
        shapes=shapes | dict(dense),
        group_size=GROUP,
        signed=True,
        directory=words,
    )


def made_words(one):
    stream_words(one)
    finish_words(one.directory, {"method": "gptq"})
    return open_words(one.directory)


def values(words, module, shape):
    read = words.read(module, 0, shape[0], signed=True)
    scale = torch.from_numpy(read.scale.copy()).view(torch.bfloat16).float()
    return torch.from_numpy(unpack_int4(read.packed, shape[1])).float() * scale.repeat_interleave(GROUP, 1)


def drawn_to_the_layer(own_TC, layer_TC):
    """As the README has it: an expert's Hessian counts as if 512 tokens of the whole layer had chosen it, too.

    So the sum of its own tokens and 512 means of the layer, over as many tokens; of 512 tokens and no expert's own, the
    layer's mean.
    """
    own_TC, layer_TC = (one.detach().numpy().astype(np.float64) for one in (own_TC, layer_TC))
    mean_CC = layer_TC.T @ layer_TC / len(layer_TC)
    return torch.from_numpy((own_TC.T @ own_TC + 512 * mean_CC) / (len(own_TC) + 512))


@torch.no_grad()
def test_an_expert_is_quantized_for_its_own_tokens_and_some_of_the_layer(tmp_path):
    """All of it again from the whole model: inputs of the experts, gate and up, then down of what these make."""
    tiny = lively_checkpoint(tmp_path / "source", "glm_moe_dsa")
    one = request(tmp_path / "source", tmp_path / "words")
    words = made_words(one)
    model, seen = whole_model(tiny, "glm_moe_dsa"), {}
    experts = model.model.layers[1].mlp.experts
    experts.register_forward_pre_hook(lambda _, args: seen.update(x=args[0], chosen=args[1]))
    model(IDS)
    for expert in range(EXPERTS):
        mine = seen["x"][(seen["chosen"] == expert).any(-1)]
        factor = factorize(drawn_to_the_layer(mine, seen["x"]), module="x")
        new = {}
        for leaf, weight in zip(("gate_proj", "up_proj"), experts.gate_up_proj[expert].chunk(2), strict=True):
            name = f"model.layers.1.mlp.experts.{expert}.{leaf}"
            made = quantize_gptq(weight.numpy(), factor, group_size=GROUP, signed=True)
            new[leaf] = values(words, name, (WIDTH, HIDDEN))
            assert_nearly_all_equal(new[leaf], values_of(made, GROUP))
        # of the weights that were chosen: a code that fell otherwise above would change all that follows
        inner = experts.act_fn(mine @ new["gate_proj"].T) * (mine @ new["up_proj"].T)
        sample = seen["x"][:512]
        inner_of_layer = experts.act_fn(sample @ new["gate_proj"].T) * (sample @ new["up_proj"].T)
        factor = factorize(drawn_to_the_layer(inner, inner_of_layer), module="x")
        made = quantize_gptq(experts.down_proj[expert].numpy(), factor, group_size=GROUP, signed=True)
        name = f"model.layers.1.mlp.experts.{expert}.down_proj"
        assert_nearly_all_equal(values(words, name, (HIDDEN, WIDTH)), values_of(made, GROUP))


def assert_nearly_all_equal(expected, got):
    """A sum in another order may tip a code that lay on the edge, and those that take its error."""
    assert (expected != got).float().mean() < 0.01


@torch.no_grad()
def test_linears_outside_the_experts_are_quantized_too(tmp_path):
    tiny = lively_checkpoint(tmp_path / "source", "glm4_moe")
    dense = {f"model.layers.{n}.self_attn.q_proj": (256, HIDDEN) for n in (0, 1)}
    dense |= {f"model.layers.{n}.self_attn.k_proj": (128, HIDDEN) for n in (0, 1)}
    words = made_words(request(tmp_path / "source", tmp_path / "words", "glm4_moe", dense))
    model, seen = whole_model(tiny, "glm4_moe"), {}
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
    model(IDS)
    x = seen["x"].reshape(-1, HIDDEN)
    factor = factorize((x.T @ x).double() / len(x), module="x")
    for leaf, rows in (("q_proj", 256), ("k_proj", 128)):
        weight = getattr(model.model.layers[0].self_attn, leaf).weight
        made = quantize_gptq(weight.numpy(), factor, group_size=GROUP, signed=True)
        found = values(words, f"model.layers.0.self_attn.{leaf}", (rows, HIDDEN))
        assert_nearly_all_equal(found, values_of(made, GROUP))


def test_an_interrupted_run_goes_on_and_gives_the_same_bytes(tmp_path):
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa", config_changes={"num_hidden_layers": 3})
    whole = made_words(request(tmp_path / "source", tmp_path / "whole"))

    class StopError(Exception):
        pass

    finished = []

    def stop(_, done):
        finished.append(done)
        if len(finished) == 3:  # the beginning, and two layers
            raise StopError

    cut = request(tmp_path / "source", tmp_path / "words")
    object.__setattr__(cut, "report_progress", stop)
    with pytest.raises(StopError):
        stream_words(cut)
    assert not list(tmp_path.glob("words/*.draft"))
    assert 0 < len(list(tmp_path.glob("words/layer-*.safetensors"))) < 3
    assert made_words(request(tmp_path / "source", tmp_path / "words")).sha256 == whole.sha256
    assert sorted(path.name for path in (tmp_path / "words").iterdir()) == sorted(
        path.name for path in (tmp_path / "whole").iterdir()
    )
