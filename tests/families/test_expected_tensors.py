"""The tensors that a config stands for: names, shapes and totals of published checkpoints."""

from typing import Any

import pytest

from quantkit.errors import SourceError
from quantkit.families import FAMILIES, ExpectedTensor, Role, family_of
from quantkit.weights.source_form import SourceForm
from quantkit.weights.stored import stored_specs
from tests.published import published_config

FORMS = {
    "bf16": SourceForm(),
    "fp8_block": SourceForm(fp8_blocks=((128, 128),)),
    "int4_native": SourceForm(int4_group_size=32),
}

# tensors and GiB; the counts of GLM-5.2-FP8, GLM-5-FP8, Kimi-K2.5 and Qwen3-235B-A22B are those of published files
TOTALS = [
    ("glm-5.2", "fp8_block", 118_629, 703.72),
    ("glm-5.2", "bf16", 59_585, 1403.19),
    ("glm-5", "fp8_block", 119_028, 704.23),
    ("kimi-k2", "fp8_block", 139_583, 958.49),
    ("kimi-k2-thinking", "int4_native", 208_215, 553.40),
    ("kimi-k2.5", "int4_native", 208_550, 554.28),
    ("deepseek-v3", "fp8_block", 91_991, 641.29),
    ("deepseek-v3.2", "fp8_block", 92_425, 642.12),
    ("glm-4.5", "bf16", 44_691, 667.46),
    ("glm-4.7", "bf16", 44_691, 667.46),
    ("glm-4.5-air", "bf16", 18_329, 205.76),
    ("glm-4.7-flash", "bf16", 9_703, 58.16),
    ("qwen3-235b-a22b", "bf16", 36_945, 437.90),
    ("qwen3-235b-a22b-fp8", "fp8_block", 73_417, 220.21),
]


def expected(config: dict[str, Any], **options: Any) -> dict[str, ExpectedTensor]:
    return {tensor.name: tensor for tensor in family_of(config).expected_tensors(config, **options)}


@pytest.mark.parametrize(("name", "form", "num_tensors", "gib"), TOTALS)
def test_totals_are_those_of_the_published_checkpoint(name, form, num_tensors, gib):
    config = published_config(name)
    stored = dict(stored_specs(family_of(config).assumed_tensors(config), FORMS[form]))
    assert len(stored) == num_tensors
    assert sum(spec.num_bytes for spec in stored.values()) / 2**30 == pytest.approx(gib, abs=0.01)


@pytest.mark.parametrize(
    ("name", "form", "total_size"),
    [("glm-5.2", "fp8_block", 755_617_140_416), ("qwen3-235b-a22b", "bf16", 470_187_269_120)],
)
def test_bytes_are_the_total_size_of_the_published_index(name, form, total_size):
    config = published_config(name)
    stored = stored_specs(family_of(config).assumed_tensors(config), FORMS[form])
    assert sum(spec.num_bytes for _, spec in stored) == total_size


def test_glm_4_6_has_no_copies_in_its_mtp_layer():
    config = published_config("glm-4.6")
    stored = dict(stored_specs(family_of(config).assumed_tensors(config, mtp_copies=False), FORMS["bf16"]))
    assert len(stored) == 44_689
    assert sum(spec.num_bytes for spec in stored.values()) / 2**30 == pytest.approx(664.57, abs=0.01)


@pytest.mark.parametrize("name", ["glm-5.2", "glm-4.7", "kimi-k2.5", "qwen3-235b-a22b"])
def test_no_name_stands_twice(name):
    config = published_config(name)
    names = [tensor.name for tensor in family_of(config).expected_tensors(config)]
    assert len(names) == len(set(names))


def test_mtp_copies_are_optional_and_the_rest_of_the_mtp_layer_is_not():
    tensors = expected(published_config("glm-5.2"))
    mtp = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.78.")}
    optional = {name.removeprefix("model.layers.78.") for name, tensor in mtp.items() if tensor.optional}
    assert optional == {"embed_tokens.weight", "shared_head.head.weight"}
    assert {
        "model.layers.78.eh_proj.weight",
        "model.layers.78.mlp.experts.255.down_proj.weight",
    } <= mtp.keys()
    assert not any(name.startswith("model.layers.79.") for name in tensors)


def test_fp8_blocks_hold_what_published_checkpoints_store_as_fp8():
    config = published_config("glm-5.2")
    stored = dict(stored_specs(family_of(config).assumed_tensors(config), FORMS["fp8_block"]))
    layer = "model.layers.6.self_attn."
    for leaf in ("kv_b_proj", "indexer.wq_b", "indexer.wk", "q_a_proj", "o_proj"):
        assert stored[f"{layer}{leaf}.weight"].dtype.name == "F8_E4M3", leaf
    for name in (
        f"{layer}indexer.weights_proj",
        "model.layers.78.eh_proj",
        "model.layers.6.mlp.gate",
        "model.embed_tokens",
        "lm_head",
    ):
        assert str(stored[f"{name}.weight"].dtype.name) == "BF16", name
        assert f"{name}.weight_scale_inv" not in stored
    assert str(stored["model.layers.6.mlp.gate.e_score_correction_bias"]) == "F32[256]"
    # 576 rows: the last block row is ragged
    assert str(stored[f"{layer}kv_a_proj_with_mqa.weight_scale_inv"]) == "F32[5, 48]"


def test_native_int4_packs_routed_experts_only():
    config = published_config("kimi-k2.5")
    stored = dict(stored_specs(family_of(config).assumed_tensors(config), FORMS["int4_native"]))
    expert = "language_model.model.layers.1.mlp.experts.0.down_proj"
    assert str(stored[f"{expert}.weight_packed"]) == "I32[7168, 256]"
    assert str(stored[f"{expert}.weight_scale"]) == "BF16[7168, 64]"
    assert str(stored[f"{expert}.weight_shape"]) == "I32[2]"
    assert f"{expert}.weight" not in stored
    assert str(stored["language_model.model.layers.1.self_attn.kv_b_proj.weight"]) == "BF16[16384, 512]"
    assert str(stored["vision_tower.patch_embed.proj.weight"]) == "BF16[1152, 3, 14, 14]"
    assert str(stored["mm_projector.proj.2.weight"]) == "BF16[7168, 4608]"


def indexer_layers(config: dict[str, Any], *, optional: bool) -> list[int]:
    return [
        int(name.split(".")[2])
        for name, tensor in expected(config).items()
        if name.endswith("indexer.wk.weight") and tensor.optional is optional
    ]


def small_dsa_config(**changes: Any) -> dict[str, Any]:
    config = {**published_config("glm-5"), "num_hidden_layers": 8, "n_routed_experts": 2}
    return config | changes


FULL = [0, 1, 2, 6, *range(10, 78, 4), 78]


def test_glm_5_2_has_indexers_on_full_layers_and_in_the_mtp_layer():
    config = published_config("glm-5.2")
    assert indexer_layers(config, optional=False) == FULL
    # files that carry the dead ones as well are no error
    assert sorted(indexer_layers(config, optional=True) + FULL) == list(range(79))
    assert indexer_layers(published_config("glm-5"), optional=False) == list(range(79))


@pytest.mark.parametrize(
    "schedule",
    [
        {"indexer_types": ["full"] * 3 + ["shared"] * 3 + ["full", "shared"]},
        {"index_topk_pattern": "FFFSSSFS"},
        {
            "indexer_types": None,
            "index_topk_pattern": None,
            "index_topk_freq": 4,
            "index_skip_topk_offset": 3,
        },
    ],
    ids=["types", "pattern", "frequency"],
)
def test_three_spellings_of_the_indexer_schedule_agree(schedule):
    assert indexer_layers(small_dsa_config(**schedule), optional=False) == [0, 1, 2, 6, 8]


def test_explicit_indexer_types_win_over_the_frequency():
    config = small_dsa_config(indexer_types=["full"] * 8, index_topk_freq=4, index_skip_topk_offset=3)
    assert indexer_layers(config, optional=True) == []


def test_layer_types_decide_where_experts_are():
    config = small_dsa_config(mlp_layer_types=["sparse", "dense"] * 4)
    layers = {name.split(".")[2] for name, tensor in expected(config).items() if tensor.role is Role.ROUTED_EXPERT}
    assert layers == {"0", "2", "4", "6", "8"}


def test_another_root_moves_layers_and_leaves_the_head_beside_the_model():
    config = small_dsa_config()
    moved = expected(config, root="language_model.model.")
    assert "language_model.model.layers.0.self_attn.o_proj.weight" in moved
    assert "language_model.lm_head.weight" in moved
    assert "lm_head.weight" in expected(config, root="model.language_model.")
    assert len(moved) == len(expected(config))


def test_a_tied_head_may_be_absent():
    assert expected(small_dsa_config(tie_word_embeddings=True))["lm_head.weight"].optional
    assert not expected(small_dsa_config())["lm_head.weight"].optional


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"moe_intermediate_size": "2048"}, "moe_intermediate_size is '2048'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"moe_layer_freq": 0}, "moe_layer_freq is 0"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"indexer_types": ["full"]}, "indexer_types does not have an entry for each of 8 layers"),
    ],
)
def test_a_bad_config_is_a_source_error_that_names_the_key(changes, message):
    with pytest.raises(SourceError, match=r"config\.json: ") as caught:
        expected(small_dsa_config(**changes))
    assert message in str(caught.value)
    assert caught.value.exit_code == 3


def test_unknown_model_types_are_generic_and_expect_nothing():
    config = {"model_type": "no_such_model", "hidden_size": 64}
    assert family_of(config).name == "generic"
    assert family_of({}).name == "generic"
    assert not family_of(config).is_known
    assert expected(config) == {}


def test_every_model_type_is_claimed_once():
    claimed = [model_type for family in FAMILIES.values() for model_type in family.model_types]
    assert len(claimed) == len(set(claimed))
    assert {family_of({"model_type": model_type}).name for model_type in claimed} == set(FAMILIES) - {"generic"}


def test_dimensions_come_from_the_nested_text_config():
    config = published_config("kimi-k2.5")
    family = family_of(config)
    assert (family.num_layers(config), family.num_mtp_layers(config)) == (61, 0)
    assert (family.num_experts(config), family.moe_width(config)) == (384, 2048)


def test_fused_experts_stack_gate_above_up():
    for family in FAMILIES.values():
        assert family.fused_experts == {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
