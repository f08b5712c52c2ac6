"""Modules that an engine loads as one must be stored in one way."""

import pytest

from quantkit.engines.fusion import FUSED_GROUPS, FUSED_LEAVES, check_one_scheme
from quantkit.errors import RecipeError

ATTENTION = "model.layers.3.self_attn"
EXPERTS = "model.layers.3.mlp.experts"


def moe_schemes(num_experts: int = 3) -> dict[str, str]:
    leaves = ("gate_proj", "up_proj", "down_proj")
    return {f"{EXPERTS}.{expert}.{leaf}": "int4" for expert in range(num_experts) for leaf in leaves}


@pytest.mark.parametrize("group", FUSED_GROUPS, ids=lambda group: "+".join(group.members))
def test_every_group_refuses_a_member_of_its_own_scheme(group):
    schemes = {f"model.layers.0.x.{member}": "bf16" for member in group.members}
    check_one_scheme(schemes)
    for odd in schemes:
        with pytest.raises(RecipeError) as caught:
            check_one_scheme(schemes | {odd: "int4"})
        named = [module for module in schemes if f"{module} is " in str(caught.value)]
        assert odd in named
        assert len(named) == 2
        assert all(leaf in str(caught.value) for leaf in group.fused_leaves)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("q_a_proj", "kv_a_proj_with_mqa"),
        ("gate_proj", "up_proj"),
        ("q_proj", "k_proj"),
        ("q_proj", "v_proj"),
        ("w1", "w3"),
    ],
)
def test_these_pairs_are_one_module_in_the_engines(first, second):
    with pytest.raises(RecipeError, match=rf"x\.{second} is INT4"):
        check_one_scheme({f"x.{first}": "BF16", f"x.{second}": "INT4"})


@pytest.mark.parametrize("odd", [f"{EXPERTS}.2.down_proj", f"{EXPERTS}.1.gate_proj", f"{EXPERTS}.0.up_proj"])
def test_one_expert_of_another_scheme_is_refused(odd):
    check_one_scheme(moe_schemes())
    with pytest.raises(RecipeError, match=odd.replace(".", r"\.")):
        check_one_scheme(moe_schemes() | {odd: "bf16"})


def test_layers_and_parts_may_differ():
    check_one_scheme(
        moe_schemes()
        | {name.replace("layers.3", "layers.4"): "bf16" for name in moe_schemes()}
        | {
            "model.layers.3.mlp.shared_experts.gate_proj": "bf16",
            "model.layers.3.mlp.shared_experts.up_proj": "bf16",
        }
        | {
            f"{ATTENTION}.q_a_proj": "fp8",
            f"{ATTENTION}.kv_a_proj_with_mqa": "fp8",
            f"{ATTENTION}.o_proj": "bf16",
        }
        | {f"{ATTENTION}.indexer.wk": "fp8", f"{ATTENTION}.indexer.weights_proj": "bf16"}
    )


def test_both_engines_spellings_of_a_fused_leaf_are_listed():
    assert FUSED_LEAVES["q_a_proj"] == ("fused_qkv_a_proj_with_mqa", "fused_qkv_a_proj")
    assert FUSED_LEAVES["up_proj"] == ("gate_up_proj",)
    assert "down_proj" not in FUSED_LEAVES
