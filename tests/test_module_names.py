"""What odd names say: whole parts of a name count, and digits from 0 to 9."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.families import FAMILIES
from quantkit.families.family import Role
from quantkit.module_names import Expert, Layer, expert_of, experts_in, layer_name, layer_of
from tests.published import published_config

MOE = "model.layers.3.mlp.experts"


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.gate.weight", Layer("model.", 3, "mlp.gate.weight")),
        ("model.layers.78.eh_proj.weight", Layer("model.", 78, "eh_proj.weight")),  # a draft's, behind the decoder
        ("language_model.model.layers.3.norm", Layer("language_model.model.", 3, "norm")),
        ("vision_tower.encoder.layers.0.norm", Layer("vision_tower.encoder.", 0, "norm")),
        ("layers.0.norm", Layer("", 0, "norm")),
        ("model.layers.3", Layer("model.", 3, "")),
        ("model.layers.007.norm", Layer("model.", 7, "norm")),
        (f"model.layers.{'0' * 5000}7.norm", Layer("model.", 7, "norm")),
        (f"model.layers.{'9' * 5000}.norm", Layer("model.", 10**9, "norm")),  # more than int() would read
        ("model.layers.3.block.layers.4.norm", Layer("model.", 3, "block.layers.4.norm")),
        ("model.layers.x.layers.4.norm", Layer("model.layers.x.", 4, "norm")),
        ("model.layers.3.\nnorm", Layer("model.", 3, "\nnorm")),
    ],
)
def test_a_name_tells_its_layer(name, layer):
    assert layer_of(name) == layer
    assert layer.rest == "" or name.endswith(f".{layer.rest}")
    assert layer_of(layer_name(layer.root, layer.number)) == layer._replace(rest="")


@pytest.mark.parametrize(
    "name",
    [
        *("", "lm_head", "model.norm.weight", "model.layers", "model.layers.", "model.layers.x.norm"),
        *("model.layers.3x.norm", "model.layers.-3.norm", "model.layers. 3.norm", "model.layers.3\n"),
        *("model.sublayers.3.norm", "model.my_layers.3.norm", "model.x-layers.3.norm", "model.layer.3.norm"),
        *("model.layers.\u00b2.norm", "model.layers.\u0663.norm", "modellayers.3.norm"),  # digits, of other kinds
    ],
)
def test_it_lies_in_no_layer(name):
    assert layer_of(name) is None


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        (f"{MOE}.5.up_proj", Expert(MOE, 5, "up_proj")),
        (f"{MOE}.5.up_proj.weight_scale_inv", Expert(MOE, 5, "up_proj.weight_scale_inv")),
        (f"{MOE}.gate_up_proj", Expert(MOE, None, "gate_up_proj")),
        (f"{MOE}.down_proj.weight", Expert(MOE, None, "down_proj.weight")),
        (f"{MOE}.token_count", Expert(MOE, None, "token_count")),
        (f"{MOE}.5", Expert(MOE, 5, "")),
        (f"{MOE}.005.up_proj", Expert(MOE, 5, "up_proj")),
        (f"{MOE}.{'9' * 5000}.up_proj", Expert(MOE, 10**9, "up_proj")),
        (f"{MOE}.\u00b2.up_proj", Expert(MOE, None, "\u00b2.up_proj")),
        (f"{MOE}.5x.up_proj", Expert(MOE, None, "5x.up_proj")),
        ("layers.0.block_sparse_moe.experts.1.w1", Expert("layers.0.block_sparse_moe.experts", 1, "w1")),
        ("experts.1.w1", Expert("experts", 1, "w1")),
    ],
)
def test_a_name_tells_its_expert(name, expert):
    assert expert_of(name) == expert
    assert experts_in(name) == expert.experts


@pytest.mark.parametrize(
    "name",
    [
        *("", "model.layers.3.mlp.gate", MOE, "model.layers.3.mlp.expert.5.up_proj", "model.layers.3.experts_norm"),
        *("model.layers.3.mlp.shared_experts.up_proj", "model.layers.3.mlp.shared_experts.0.up_proj"),
    ],
)
def test_it_is_of_no_routed_expert(name):
    assert expert_of(name) is experts_in(name) is None


@given(st.lists(st.sampled_from(["experts", "layers", "shared_experts", "3", "07", "x", ""]), max_size=8))
def test_the_quick_way_finds_the_same_experts(parts):
    name = ".".join(parts)
    expert = expert_of(name)
    assert experts_in(name) == (None if expert is None else expert.experts)


def test_names_of_a_published_model_agree_with_its_roles():
    """Every routed expert has a number, nothing else lies in experts; what has no layer is one of the ends."""
    config = published_config("glm-5.2") | {"n_routed_experts": 3}
    num_layers = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    seen = set()
    for tensor in FAMILIES["glm_moe_dsa"].expected_tensors(config, root="language_model.model."):
        layer, expert = layer_of(tensor.name), expert_of(tensor.name)
        assert (expert is not None) == (tensor.role is Role.ROUTED_EXPERT)
        assert expert is None or expert.number in range(3)
        if layer is None:
            assert tensor.role in (Role.EMBEDDING, Role.NORM, Role.HEAD)
        else:
            assert layer.root == "language_model.model."
            seen.add(layer.number)
    assert seen == set(range(num_layers))
