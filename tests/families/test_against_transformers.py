"""An independent oracle: the parameters of the classes in transformers, built on the meta device.

transformers stacks experts in 3-D tensors and builds no MTP layer.
"""

from typing import Any

import pytest

from quantkit.families import FAMILIES, family_of

MOE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
DSA = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
SHARED = {"indexer_types": ["full", "full", "shared", "shared", "full"]}
GQA = {"num_key_value_heads": 2, "head_dim": 6}
QWEN = {
    **{key: value for key, value in MOE.items() if key not in ("n_routed_experts", "n_shared_experts")},
    **{"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [2], **GQA},
}

CASES = {
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        **MOE,
        **MLA,
        **DSA,
        "mlp_layer_types": ["dense"] + ["sparse"] * 4,
    },
    "glm_moe_dsa, shared indexers": {
        **{"model_type": "glm_moe_dsa", **MOE, **MLA, **DSA, **SHARED},
        "mlp_layer_types": ["dense"] + ["sparse"] * 4,
    },
    "glm4_moe": {"model_type": "glm4_moe", **MOE, **GQA, "attention_bias": True, "use_qk_norm": True},
    "glm4_moe without norm and bias": {"model_type": "glm4_moe", **MOE, **GQA, "attention_bias": False},
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        **MOE,
        **MLA,
        "mlp_layer_types": ["dense"] + ["sparse"] * 4,
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **MOE, **MLA},
    "deepseek_v3 without q rank": {"model_type": "deepseek_v3", **MOE, **MLA, "q_lora_rank": None},
    "deepseek_v3 with bias": {"model_type": "deepseek_v3", **MOE, **MLA, "attention_bias": True},
    "deepseek_v32": {"model_type": "deepseek_v32", **MOE, **MLA, **DSA},
    "qwen3_moe": QWEN,
    "qwen3_moe with bias": {**QWEN, "attention_bias": True},
    "qwen3_moe, every other layer": {**QWEN, "num_hidden_layers": 8, "mlp_only_layers": [], "decoder_sparse_step": 2},
}


def built_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name to shape of a model's tensors, its experts split as families say."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    options = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config["model_type"], **options)
        )
    fused = FAMILIES["glm_moe_dsa"].fused_experts
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        parent, _, leaf = name.rpartition(".")
        if not parent.endswith(".experts"):
            shapes[name] = tuple(tensor.shape)
            continue
        num_experts, rows, cols = tensor.shape
        for expert in range(num_experts):
            for projection in fused[leaf]:
                shapes[f"{parent}.{expert}.{projection}.weight"] = (rows // len(fused[leaf]), cols)
    return shapes


@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_names_and_shapes_are_those_of_the_model(config):
    family = family_of(config)
    built = built_shapes(config)
    required = {tensor.name: tensor.shape for tensor in family.expected_tensors(config) if not tensor.optional}
    allowed = {tensor.name: tensor.shape for tensor in family.expected_tensors(config)}
    assert required.keys() <= built.keys() <= allowed.keys()
    assert built == {name: allowed[name] for name in built}
    assert sum(".experts." in name for name in built) == 4 * 4 * 3
