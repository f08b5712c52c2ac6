"""Qwen3-MoE: which layers are sparse, what it lacks beside the other families, and a whole conversion."""

import json

import pytest

from quantkit.errors import SourceError
from quantkit.families import FAMILIES, Role
from tests.convert.helpers import convert, load_output, oracle_int4, same
from tests.tiny import EXPERTS, tiny_config

FAMILY = FAMILIES["qwen3_moe"]


def roles_of(**changes):
    """Role of every tensor of a config of eight layers."""
    config = tiny_config("qwen3_moe", num_hidden_layers=8, mlp_only_layers=[]) | changes
    return {tensor.name: tensor.role for tensor in FAMILY.expected_tensors(config)}


def sparse_layers(**changes):
    found = roles_of(**changes)
    sparse = {int(name.split(".")[2]) for name, role in found.items() if role is Role.ROUTED_EXPERT}
    dense = {int(name.split(".")[2]) for name, role in found.items() if role is Role.DENSE_MLP}
    assert sorted([*sparse, *dense]) == list(range(8))
    return sorted(sparse)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, list(range(8))),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, list(range(8))),
        ({"mlp_only_layers": [0, 7]}, [1, 2, 3, 4, 5, 6]),
        ({"decoder_sparse_step": 3}, [2, 5]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3, 4]}, [1, 5, 7]),
        ({"num_experts": 0}, []),
        # keys of other families say nothing here
        ({"first_k_dense_replace": 3, "moe_layer_freq": 2, "mlp_layer_types": ["dense"] * 8}, list(range(8))),
    ],
)
def test_step_and_list_decide_where_experts_are(changes, expected):
    assert sparse_layers(**changes) == expected


def test_no_router_bias_no_shared_expert_no_mtp_layer():
    found = roles_of(n_shared_experts=1, num_nextn_predict_layers=1)
    assert {Role.ROUTER_BIAS, Role.SHARED_EXPERT, Role.MTP_PROJECTION}.isdisjoint(found.values())
    assert not [name for name in found if name.startswith("model.layers.8.") or name.endswith(".bias")]
    assert found["model.layers.0.mlp.gate.weight"] is Role.ROUTER
    assert found["model.layers.0.self_attn.q_norm.weight"] is Role.NORM


def test_the_number_of_experts_as_transformers_5_writes_it():
    config = tiny_config("qwen3_moe")
    renamed = {key: value for key, value in config.items() if key != "num_experts"} | {"num_local_experts": EXPERTS}
    assert list(FAMILY.expected_tensors(renamed)) == list(FAMILY.expected_tensors(config))
    assert FAMILY.num_experts(renamed) == FAMILY.num_experts(config) == EXPERTS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "num_experts is missing"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3"),
        ({"mlp_only_layers": ["0"]}, r"mlp_only_layers is \['0'\]"),
        ({"mlp_only_layers": [True]}, r"mlp_only_layers is \[True\]"),
    ],
)
def test_a_bad_config_is_a_source_error_that_names_the_key(changes, message):
    with pytest.raises(SourceError, match=rf"config\.json: {message}"):
        roles_of(**changes)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_tied_head_may_be_absent(is_tied):
    config = tiny_config("qwen3_moe", tie_word_embeddings=is_tied)
    head = next(tensor for tensor in FAMILY.expected_tensors(config) if tensor.name == "lm_head.weight")
    assert head.optional is is_tied


@pytest.mark.parametrize("form", ["fp8_block", "bf16"])
@pytest.mark.parametrize("fused", [False, True])
def test_without_a_recipe_the_experts_become_int4_and_nothing_else(form, fused, tiny_checkpoint, tmp_path):
    source = tiny_checkpoint(model_type="qwen3_moe", source_format=form, fused_experts=fused)
    convert(source.directory, tmp_path / "out", scales="absmax")
    output = load_output(tmp_path / "out")
    for name, decoded in source.decoded.items():
        module = name.removesuffix(".weight")
        if ".experts." in name:
            packed, scale = oracle_int4(decoded, 32)
            assert same(output.pop(f"{module}.weight_packed"), packed), name
            assert same(output.pop(f"{module}.weight_scale"), scale), name
            assert output.pop(f"{module}.weight_shape").tolist() == list(decoded.shape)
        else:
            kept = output.pop(name)
            assert same(kept, decoded.to(kept.dtype)), name
    assert not output
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {"lm_head", r"re:.*mlp\.gate$", "re:.*self_attn.*"} <= set(section["ignore"])
