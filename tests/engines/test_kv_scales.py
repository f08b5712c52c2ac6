"""Stored KV scales in `verify --engine`: what names and config say, and that `kv-scales` says the same of them."""

import numpy as np
import pytest

from quantkit.engines.check import check_engine
from quantkit.engines.kv_use import Attention, KvScales, KvUse, kv_use_in
from quantkit.engines.launch import NO_FUSION, Launch
from quantkit.engines.parallel import ENGINES
from quantkit.engines.verdicts import Outcome
from quantkit.families import FAMILIES
from quantkit.kv_scales.spelling import LayerScales, config_section, scale_tensors
from quantkit.tensors import F32, TensorSpec
from tests.engines.test_contract import Case, only_experts
from tests.engines.test_kv_use import KINDS
from tests.tiny import tiny_config

GENERIC = FAMILIES["generic"]
STATIC_KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
HEAD_KV = STATIC_KV | {"strategy": "attn_head"}
DENSE = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
MODELS = [*KINDS, "llama", "exaone4", "qwen3", "phi"]
SPELLINGS = [("compressed-tensors", "tensor"), ("modelopt", "tensor"), ("compressed-tensors", "head")]


def said(family, config, stored, engine):
    report = check_engine(family, config, stored, Launch(engine=engine), root="model.")
    return [row.example for row in report.rows if "KV scales" in row.name]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("spelling", "scope"), SPELLINGS)
@pytest.mark.parametrize("model_type", MODELS)
def test_verify_and_kv_scales_say_the_same(model_type, spelling, scope, engine):
    family = FAMILIES[model_type] if model_type in KINDS else GENERIC
    attention = KINDS.get(model_type, Attention.GROUPED)
    kind = KvScales(
        family=family.name,
        model_type=model_type,
        attention=attention,
        spelling=spelling,
        scope="tensor" if attention is not Attention.GROUPED else scope,
        method="compressed-tensors",
    )
    config = dict(tiny_config(model_type)) if model_type in KINDS else {"model_type": model_type, **DENSE}
    config["quantization_config"] = only_experts() | config_section(kind)
    ones = np.ones(2 if kind.scope == "head" else 1, np.float32)
    tensors = scale_tensors([LayerScales(layer=1, module="model.layers.1.self_attn", k=ones, v=ones)], kind)
    stored = {name: TensorSpec(F32, array.shape) for name, array in tensors.items()}

    rows = kv_use_in(engine, kind)
    found = said(family, config, stored, engine)
    bad = [row.backend for row in rows if row.use in (KvUse.HARMFUL, KvUse.REFUSED)]
    if len({(row.use, row.why) for row in rows}) == 1 and rows[0].use is not KvUse.USED:  # they do not arrive
        assert [one.message.partition(": ")[2] for one in found] == [rows[0].why]
        outcomes = {KvUse.IGNORED: Outcome.LOADS, KvUse.UNKNOWN: Outcome.UNKNOWN, KvUse.REFUSED: Outcome.REFUSED}
        assert found[0].outcome is outcomes[rows[0].use]
    else:
        assert {one.outcome for one in found} == ({Outcome.FLAG} if bad else set())
        remedies = ", ".join(one.remedy.removeprefix("use another attention backend than ") for one in found)
        assert sorted(remedies.replace(", or leave the scales out", "").split(", ")) == sorted(bad or [""])


@pytest.mark.parametrize(
    ("model_type", "leaf", "scheme", "sglang", "vllm"),
    [
        ("deepseek_v3", "k_proj.k_scale", STATIC_KV, "trtllm_mla, cutedsl_mla, flashmla", "no name of a scale"),
        ("deepseek_v3", "attn_mqa.k_scale", STATIC_KV, "trtllm_mla, cutedsl_mla, flashmla", "no name of a scale"),
        ("deepseek_v3", "k_scale", STATIC_KV, "knows no such name", "no name of a scale"),
        ("deepseek_v3", "k_proj.k_scale", None, "declares no static FP8", "no name of a scale"),
        ("deepseek_v3", "k_proj.k_scale", STATIC_KV | {"dynamic": True}, "declares no static", "no name of a scale"),
        ("deepseek_v3", "k_proj.k_scale", {"num_bits": 8, "type": "float"}, "declares no static", "no name of a scale"),
        ("glm4_moe_lite", "k_proj.k_scale", STATIC_KV, "garbles these names", "no name of a scale"),
        ("glm_moe_dsa", "k_proj.k_scale", STATIC_KV, "wrong in trtllm: ", "no name of a scale"),
        ("glm4_moe", "k_scale", STATIC_KV, "without a place for scales", ""),
        ("glm4_moe", "qkv_proj.k_scale", STATIC_KV, "without a place for scales", ""),
        ("glm4_moe", "attn.k_scale", STATIC_KV, "without a place for scales", ""),
        ("glm4_moe", "attn_mqa.k_scale", STATIC_KV, "without a place for scales", "knows no such name"),
        ("deepseek_v3", None, STATIC_KV, "no scale is there", "no scale is there"),
        ("deepseek_v3", None, None, "", ""),
    ],
)
def test_scales_of_a_kv_cache(model_type, leaf, scheme, sglang, vllm):
    case = Case(model_type, document=only_experts() | {"kv_cache_scheme": scheme})
    if leaf is not None:
        case.stored[f"model.layers.1.self_attn.{leaf}"] = TensorSpec(F32, ())
    for engine, words in (("sglang", sglang), ("vllm", vllm)):
        report = case.check(engine, flags=(NO_FUSION,))
        found = [row.example.message for row in report.rows if "KV scales" in row.name]
        assert [words in message for message in found] == ([True] if words else [])
        assert report.bad_rows == ()


@pytest.mark.parametrize(
    ("model_type", "leaf", "sglang", "vllm"),
    [
        ("llama", "k_scale", "", ""),
        ("llama", "k_proj.k_scale", "", ""),
        ("llama", "attn.k_scale", "knows no such name", ""),
        ("llama", "qkv_proj.k_scale", "knows no such name", ""),
        ("phi", "k_scale", "not stated here", ""),
    ],
)
def test_names_of_other_models(model_type, leaf, sglang, vllm):
    config = {"model_type": model_type, **DENSE}
    config["quantization_config"] = only_experts() | {"kv_cache_scheme": STATIC_KV}
    stored = {f"model.layers.0.self_attn.{leaf}": TensorSpec(F32, (1,))}
    for engine, words in (("sglang", sglang), ("vllm", vllm)):
        found = said(GENERIC, config, stored, engine)
        assert [words in one.message for one in found] == ([True] if words else [])
    del config["quantization_config"]
    assert said(GENERIC, config, stored, "sglang")[0].outcome is Outcome.LOADS
    assert said(GENERIC, config, stored, "vllm")[0].outcome is Outcome.REFUSED
    config["sliding_window"] = 4096
    assert said(GENERIC, config, stored, "vllm")[0].outcome is Outcome.UNKNOWN


def test_scales_per_head_need_a_scheme_per_head():
    config = {"model_type": "llama", **DENSE}
    stored = {"model.layers.0.self_attn.k_scale": TensorSpec(F32, (2, 1, 1))}
    for scheme, outcome in ((HEAD_KV, Outcome.FLAG), (STATIC_KV, Outcome.REFUSED)):
        config["quantization_config"] = only_experts() | {"kv_cache_scheme": scheme}
        assert said(GENERIC, config, stored, "vllm")[0].outcome is outcome


@pytest.mark.parametrize(
    ("model_type", "leaves", "engine", "outcome"),
    [
        ("glm4_moe", ("k_scale", "attn.k_scale"), "vllm", Outcome.UNKNOWN),
        ("glm4_moe", ("k_scale", "v_scale"), "vllm", None),
        ("deepseek_v3", ("k_proj.k_scale", "attn_mqa.k_scale"), "sglang", Outcome.UNKNOWN),
        ("deepseek_v3", ("k_scale", "attn_mqa.k_scale"), "sglang", Outcome.FLAG),  # of which it reads the second
    ],
)
def test_a_scale_of_a_kv_cache_under_two_names(model_type, leaves, engine, outcome):
    case = Case(model_type, document=only_experts() | {"kv_cache_scheme": STATIC_KV})
    case.stored |= {f"model.layers.1.self_attn.{leaf}": TensorSpec(F32, ()) for leaf in leaves}
    found = [row.example for row in case.check(engine, flags=(NO_FUSION,)).rows if "KV scales" in row.name]
    assert ([one.outcome for one in found] or [None])[-1] is outcome
    assert all("has two names" in one.message for one in found if one.outcome is Outcome.UNKNOWN)
