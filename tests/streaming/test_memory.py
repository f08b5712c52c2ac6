"""What is in memory while a model runs: a layer without its experts, and a few experts, however many there are."""

import weakref

import torch

from quantkit.streaming import experts as experts_module
from quantkit.streaming import open_states
from tests.streaming.models import lively_checkpoint
from tests.streaming.test_forward import IDS, opened


def test_two_experts_are_alive_at_a_time(tmp_path, monkeypatch):
    """The weights that `decode_weight` gives out are counted while they live."""
    alive, most = weakref.WeakSet(), 0
    decode = experts_module.decode_weight

    def counted(weight):
        nonlocal most
        value = decode(weight)
        alive.add(value.untyped_storage())
        most = max(most, len(alive))
        return value

    monkeypatch.setattr(experts_module, "decode_weight", counted)
    lively_checkpoint(tmp_path / "source", "glm_moe_dsa", config_changes={"n_routed_experts": 16})
    model = opened(tmp_path / "source")
    states = open_states(*IDS.shape, model.hidden_size, dtype=torch.float32)
    states.hidden[:] = model.embed(IDS.reshape(-1))
    for index in range(model.num_layers):
        model.layer(index).run(states)
    assert 3 <= most <= 2 * 3  # gate, up and down of two; of one where the thread that loads was late


def test_a_layer_lives_as_long_as_it_is_held(tmp_path):
    lively_checkpoint(tmp_path / "source", "glm4_moe")
    model = opened(tmp_path / "source")
    layer = model.layer(0)
    weight = weakref.ref(layer.module.self_attn.q_proj.weight)
    assert not weight().is_meta
    del layer
    assert weight() is None
    assert all(slot.is_meta for slot in model.skeleton.model.layers.parameters())
