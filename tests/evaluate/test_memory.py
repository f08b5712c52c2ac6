"""What is in memory of two models: two layers without their experts and two experts, however many there are."""

import weakref

import pytest

from quantkit.evaluate.run import Pair, evaluate
from quantkit.streaming import Tokens
from quantkit.streaming import experts as experts_module
from quantkit.streaming import model as model_module
from tests.convert.helpers import convert
from tests.streaming.models import lively_checkpoint
from tests.streaming.test_forward import IDS, opened

NUM_EXPERTS = 32


@pytest.fixture
def alive(monkeypatch):
    """Bytes of decoded weights that live, by whether they are experts; the most there were of each."""
    storages = {"experts": weakref.WeakSet(), "layers": weakref.WeakSet()}
    most = dict.fromkeys(storages, 0)

    def watch(module, kind):
        decode = module.decode_weight

        def watched(weight):
            value = decode(weight)
            storages[kind].add(value.untyped_storage())
            most[kind] = max(most[kind], sum(one.nbytes() for one in storages[kind]))
            return value

        monkeypatch.setattr(module, "decode_weight", watched)

    watch(experts_module, "experts")
    watch(model_module, "layers")
    return most


def test_two_layers_and_two_experts_are_alive_at_a_time(tmp_path, alive):
    changes = {"n_routed_experts": NUM_EXPERTS, "num_hidden_layers": 4}
    lively_checkpoint(tmp_path / "source", "glm4_moe", config_changes=changes)
    convert(tmp_path / "source", tmp_path / "out")
    pair = Pair(opened(tmp_path / "source"), opened(tmp_path / "out"))
    evaluate(pair, Tokens(ids_NS=IDS.numpy()), work=None)
    weights = pair.source.binding.weights.values()
    layers = [0] * 4
    for weight in weights:
        if ".layers." in weight.name and ".experts." not in weight.name:
            layers[int(weight.name.split(".")[2])] += 4 * weight.num_elements
    expert = sum(4 * one.num_elements for one in weights if ".layers.1.mlp.experts.0." in one.name)
    assert expert <= alive["experts"] <= 2 * expert  # one is loaded while another is in use, or behind it
    assert max(layers) <= alive["layers"] <= 2 * max(layers)
    assert alive["experts"] + alive["layers"] < 0.1 * 2 * (sum(layers) + 3 * NUM_EXPERTS * expert)
