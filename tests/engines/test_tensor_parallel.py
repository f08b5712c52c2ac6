"""How far a checkpoint can be split, by group size and engine."""

from typing import Any

import pytest

from quantkit.engines.parallel import ENGINES
from quantkit.engines.tensor_parallel import TP_SIZES, legal_sizes, legal_tp
from quantkit.families import FAMILIES, family_of
from tests.published import published_config


def verdicts(name: str, group_size: int, *, expert_parallel: bool = False, **changes: Any):
    config = published_config(name) | changes
    return legal_tp(family=family_of(config), config=config, group_size=group_size, expert_parallel=expert_parallel)


def one(found, tp: int, engine: str):
    return next(verdict for verdict in found if (verdict.tp, verdict.engine) == (tp, engine))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("name", "group_size", "sizes"),
    [
        # experts 2048 wide
        ("glm-5.2", 32, (1, 2, 4, 8, 16, 32)),
        ("glm-5.2", 64, (1, 2, 4, 8, 16, 32)),
        ("glm-5.2", 128, (1, 2, 4, 8, 16)),
        ("kimi-k2.5", 32, (1, 2, 4, 8, 16, 32)),
        ("kimi-k2.5", 128, (1, 2, 4, 8, 16)),
        # 1536
        ("glm-4.7", 32, (1, 2, 4, 8, 16)),
        ("glm-4.7", 64, (1, 2, 4, 8)),
        ("glm-4.7", 128, (1, 2, 4)),
        # 1408
        ("glm-4.5-air", 32, (1, 2, 4)),
        ("glm-4.5-air", 64, (1, 2)),
        ("glm-4.5-air", 128, (1,)),
        # 20 heads
        ("glm-4.7-flash", 32, (1, 2, 4)),
    ],
)
def test_legal_sizes(name, group_size, sizes, engine):
    assert legal_sizes(verdicts(name, group_size), engine) == sizes


def test_every_size_gets_a_verdict_and_every_refusal_a_reason():
    found = verdicts("glm-4.5-air", 64)
    assert [(verdict.tp, verdict.engine) for verdict in found] == [(tp, e) for tp in TP_SIZES for e in ENGINES]
    refused = [verdict for verdict in found if verdict.status == "refused"]
    assert refused
    assert all(verdict.reason and not verdict.kernels for verdict in refused)
    assert all(verdict.kernels for verdict in found if verdict.status == "ok")


def test_a_cut_through_a_group_says_so_in_numbers():
    for engine in ENGINES:
        verdict = one(verdicts("glm-5.2", 128, moe_intermediate_size=640), 2, engine)
        assert verdict.status == "refused"
        assert "640 / 2 = 320 columns" in verdict.reason
        assert "groups of 128" in verdict.reason


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_glm_4_5_air_does_not_serve_at_tp_8(group_size):
    assert {one(verdicts("glm-4.5-air", group_size), 8, engine).status for engine in ENGINES} == {"refused"}


def test_marlin_in_sglang_needs_whole_tiles_where_vllm_pads():
    # 1536 / 16 = 96 columns: three groups of 32, one and a half tiles of 64
    found = verdicts("glm-4.7", 32)
    assert one(found, 16, "sglang").kernels == ("triton",)
    assert "multiple of 64" in one(found, 16, "sglang").reason
    assert one(found, 16, "vllm").kernels == ("marlin",)
    assert one(found, 8, "sglang").kernels == ("marlin", "triton")


def test_groups_of_64_leave_sglang_with_marlin():
    assert one(verdicts("glm-5.2", 64), 8, "sglang").kernels == ("marlin",)


@pytest.mark.parametrize(
    ("changes", "tp", "reason"),
    [
        ({"num_attention_heads": 20, "num_key_value_heads": 20}, 8, "20 attention heads"),
        ({"num_attention_heads": 24, "num_key_value_heads": 6}, 4, "6 key-value heads"),
        ({"intermediate_size": 12292}, 8, "dense MLP's width 12292"),
        ({"hidden_size": 6128}, 1, "hidden size 6128"),
        ({"moe_intermediate_size": 2049}, 2, "expert width 2049"),
    ],
)
def test_other_refusals_name_the_number(changes, tp, reason):
    verdict = one(verdicts("glm-5.2", 32, **changes), tp, "vllm")
    assert verdict.status == "refused"
    assert reason in verdict.reason


def test_expert_parallelism_does_not_cut_experts():
    assert legal_sizes(verdicts("glm-4.7", 128, expert_parallel=True), "sglang") == (1, 2, 4, 8, 16, 32)
    verdict = one(verdicts("glm-4.7", 128, expert_parallel=True, n_routed_experts=100), 8, "sglang")
    assert "100 experts" in verdict.reason


def test_a_family_without_known_rules_is_never_ok():
    config = {"model_type": "mystery", "hidden_size": 4096, "num_attention_heads": 32, "num_local_experts": 8}
    found = legal_tp(family=FAMILIES["generic"], config=config, group_size=32)
    assert {verdict.status for verdict in found} == {"unknown"}
    assert len(found) == len(TP_SIZES) * len(ENGINES)


@pytest.mark.parametrize(
    ("engine", "kind", "sizes"),
    [
        ("sglang", "w4a16", (1, 2, 4, 8, 16)),
        ("vllm", "w4a16", (1, 2, 4, 8, 16)),
        ("sglang", "zero points", ()),
        ("vllm", "zero points", (1, 2, 4, 8, 16)),
        ("sglang", "w4a8", (1, 2, 4, 8, 16)),
        ("vllm", "w4a8", (1, 2, 4, 8)),
        ("sglang", "w4afp8", (1, 2, 4, 8, 16)),
        ("vllm", "w4afp8", ()),
    ],
)
def test_experts_of_every_kind(engine, kind, sizes):
    """Of 2048 columns in groups of 128: vLLM's W4A8 kernel wants 256 on a rank."""
    config = published_config("glm-5.2")
    found = legal_tp(family=family_of(config), config=config, group_size=128, kind=kind)
    assert legal_sizes(found, engine) == sizes
