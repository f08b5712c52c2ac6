"""Which part a name plays, whatever stands before it."""

import json
import re

import pytest

from quantkit.engines.fusion import FUSED_LEAVES
from quantkit.families import FAMILIES, NEVER_QUANTIZED, Role, family_of, text_config
from tests.published import NAMES, published_config

CONFIGS = {name: published_config(name) for name in NAMES}
KNOWN = [family for family in FAMILIES.values() if family.is_known]
PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")


def few_experts(config):
    """The same layers with four experts each: the names of the others differ in a number."""
    smaller = json.loads(json.dumps(config))
    text = text_config(smaller)
    text["n_routed_experts" if "n_routed_experts" in text else "num_experts"] = 4
    return smaller


def configs():
    return [pytest.param(few_experts(config), id=name) for name, config in sorted(CONFIGS.items())]


def test_every_known_family_has_a_config():
    assert {family_of(config).name for config in CONFIGS.values()} == {family.name for family in KNOWN}


@pytest.mark.parametrize("config", configs())
def test_patterns_and_expected_tensors_agree_on_every_role(config):
    family = family_of(config)
    for tensor in family.expected_tensors(config):
        assert family.role_of(tensor.name) is tensor.role, tensor.name
        assert family.role_of(tensor.name.removesuffix(".weight")) is tensor.role, tensor.name


@pytest.mark.parametrize("family", KNOWN, ids=lambda family: family.name)
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("layers.3.mlp.experts.7.up_proj.weight", Role.ROUTED_EXPERT),
        ("layers.3.mlp.experts.7.up_proj.weight_packed", Role.ROUTED_EXPERT),
        ("layers.3.mlp.experts.7.up_proj.weight_scale_inv", Role.ROUTED_EXPERT),
        ("layers.3.mlp.experts.gate_up_proj", Role.ROUTED_EXPERT),
        ("layers.3.mlp.experts.down_proj", Role.ROUTED_EXPERT),
        ("layers.3.mlp.shared_experts.up_proj.weight", Role.SHARED_EXPERT),
        ("layers.3.mlp.up_proj.weight", Role.DENSE_MLP),
        ("layers.3.mlp.gate_proj.weight", Role.DENSE_MLP),
        ("layers.3.mlp.gate.weight", Role.ROUTER),
        ("layers.3.mlp.gate.e_score_correction_bias", Role.ROUTER_BIAS),
        ("layers.3.self_attn.o_proj", Role.ATTENTION),
        ("layers.3.post_attention_layernorm.weight", Role.NORM),
        ("layers.92.eh_proj.weight", Role.MTP_PROJECTION),
        ("layers.92.shared_head.head.weight", Role.HEAD),
        ("layers.92.shared_head.norm.weight", Role.NORM),
        ("layers.92.embed_tokens.weight", Role.EMBEDDING),
        ("layers.3.self_attn.k_scale", Role.KV_SCALE),
        ("layers.3.self_attn.attn_mqa.v_scale", Role.KV_SCALE),
        ("layers.3.self_attn.k_proj.k_scale", Role.KV_SCALE),
        ("layers.3.self_attn.something_new.weight", Role.UNKNOWN),
        ("layers.3.mlp.experts.7.something_new.weight", Role.UNKNOWN),
    ],
)
def test_roles_hold_below_any_prefix(family, prefix, name, role):
    assert family.role_of(prefix + name) is role


def test_sparse_attention_keeps_its_parts_apart():
    role_of = FAMILIES["glm_moe_dsa"].role_of
    assert role_of("model.layers.0.self_attn.kv_b_proj") is Role.KV_B
    assert role_of("model.layers.0.self_attn.indexer.wq_b") is Role.INDEXER
    for leaf in ("wk", "weights_proj", "k_norm", "k_norm.bias"):
        assert role_of(f"model.layers.0.self_attn.indexer.{leaf}") is Role.INDEXER_FIXED


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.layers.0.block_sparse_moe.experts.3.w1.weight", Role.ROUTED_EXPERT),
        ("model.layers.0.mlp.experts.gate_up_proj", Role.ROUTED_EXPERT),
        ("model.layers.0.block_sparse_moe.gate.weight", Role.ROUTER),
        ("model.layers.0.mlp.shared_expert_gate.weight", Role.ROUTER),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", Role.SHARED_EXPERT),
        ("model.layers.0.self_attn.q_proj.weight", Role.LINEAR),
        ("model.layers.0.mlp.gate_proj.weight", Role.LINEAR),
        ("model.layers.0.self_attn.q_norm.weight", Role.NORM),
        ("model.layers.0.self_attn.v_proj.v_scale", Role.KV_SCALE),
        ("encoder.layer.0.attention.self.query.weight", Role.LINEAR),
        ("encoder.layer.0.attention.output.LayerNorm.weight", Role.NORM),
        ("embeddings.word_embeddings.weight", Role.EMBEDDING),
        ("model.embed_tokens.weight", Role.EMBEDDING),
        ("lm_head.weight", Role.HEAD),
        ("model.norm.weight", Role.NORM),
        ("visual.blocks.0.attn.qkv.weight", Role.VISION),
        ("model.layers.0.mixer.A_log", Role.UNKNOWN),
        ("classifier.weight", Role.UNKNOWN),
    ],
)
def test_generic_roles_follow_custom(name, role):
    assert FAMILIES["generic"].role_of(name) is role


def test_experts_and_what_may_follow_them_are_not_protected():
    assert {Role.ROUTED_EXPERT, Role.SHARED_EXPERT, Role.DENSE_MLP, Role.ATTENTION, Role.LINEAR}.isdisjoint(
        NEVER_QUANTIZED
    )
    assert {Role.ROUTER, Role.KV_B, Role.MTP_PROJECTION, Role.INDEXER_FIXED} <= NEVER_QUANTIZED


def is_ignored(module: str, patterns: tuple[str, ...]) -> bool:
    return any(re.match(entry[3:], module) if entry.startswith("re:") else entry == module for entry in patterns)


@pytest.mark.parametrize("config", configs())
@pytest.mark.parametrize("runtime_prefix", ["", "model.decoder."])
def test_ignore_list_hits_all_linears_but_experts_under_every_name(config, runtime_prefix):
    """Names in the files, names that engines fuse, and SGLang's name for the draft layer."""
    family = family_of(config)
    num_hit = 0
    for tensor in family.expected_tensors(config):
        if len(tensor.shape) != 2 or tensor.role in (Role.EMBEDDING, Role.HEAD):
            continue
        module = tensor.name.removesuffix(".weight")
        if runtime_prefix and tensor.role is not Role.VISION:
            module = re.sub(r"^.*layers\.\d+\.", runtime_prefix, module)
        parent, _, leaf = module.rpartition(".")
        spellings = [module]
        if tensor.role is not Role.ROUTED_EXPERT:
            spellings += [f"{parent}.{fused}" for fused in FUSED_LEAVES.get(leaf, ())]
        for spelling in spellings:
            assert is_ignored(spelling, family.ignore) is (tensor.role is not Role.ROUTED_EXPERT), spelling
            num_hit += 1
    assert num_hit > 1000
