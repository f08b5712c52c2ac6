"""Which scheme a module gets in which engine, row by row of what the engines' own code answered."""

import pytest

from quantkit.engines.matching import MatchError
from quantkit.engines.sglang import SGLANG
from quantkit.engines.vllm import VLLM

ENGINES = {"sglang": SGLANG, "vllm": VLLM}
FUSED_A = {"sglang": "fused_qkv_a_proj_with_mqa", "vllm": "fused_qkv_a_proj"}
FUSED_A_CLASS = {"sglang": "ReplicatedLinear", "vllm": "DeepSeekV2FusedQkvAProjLinear"}
EXPERTS_CLASS = {"sglang": "FusedMoE", "vllm": "RoutedExperts"}

I0 = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
_FP8_NAIVE = [
    r"re:.*self_attn\.(q_a_proj|kv_a_proj_with_mqa|q_b_proj|o_proj|indexer\.wq_b)$",
    r"re:.*shared_experts\.(gate_proj|up_proj|down_proj)$",
    r"re:.*mlp\.(gate_proj|up_proj|down_proj)$",
]
_FP8_SAFE = [
    r"re:.*self_attn\.(fused_qkv_a_proj(_with_mqa)?|q_a_proj|kv_a_proj_with_mqa|q_b_proj|o_proj|indexer\.wq_b)$",
    r"re:.*shared_experts\.(gate_up_proj|gate_proj|up_proj|down_proj)$",
    r"re:.*mlp\.(gate_up_proj|gate_proj|up_proj|down_proj)$",
]
_T7 = [
    f"model.layers.{layer}.{leaf}"
    for layer in (0, 3)
    for leaf in (
        *(f"self_attn.{one}" for one in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")),
        "self_attn.indexer.wq_b",
        *(f"{mlp}.{one}_proj" for mlp in ("mlp", "mlp.shared_experts") for one in ("gate", "up", "down")),
    )
]
# name: (targets with their scheme, ignore)
CONFIGS = {
    "T1": ({"Linear": "4"}, I0),
    "T2": ({"Linear": "4"}, [*I0, r"re:model\.layers\.78\..*"]),
    "T3": ({"Linear": "4"}, [*I0, r"re:model\.(layers\.78|decoder)\..*"]),
    "T4": (dict.fromkeys(_FP8_NAIVE, "8") | {"Linear": "4"}, ["lm_head", "re:.*kv_b_proj$"]),
    "T5": (dict.fromkeys(_FP8_SAFE, "8") | {"Linear": "4"}, ["lm_head", "re:.*kv_b_proj$"]),
    "T6": ({r"re:.*mlp\.experts\..*": "4"}, ["lm_head"]),
    "T7": ({"Linear": "4"}, ["lm_head", *_T7]),
}
ROW, COLUMN, MERGED, REPLICATED = (
    "RowParallelLinear",
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "ReplicatedLinear",
)
LAYER = {"sglang": "model.decoder", "vllm": "model.layers.78"}
# place and leaf of a module: SGLang / vLLM for T1 to T7. The draft of vLLM alone has no fused names
TABLE = [
    (("3", "fused_a"), "b/b b/b b/b 4/8 8/8 E/- b/b"),
    (("3", "self_attn.q_b_proj"), "b/b b/b b/b 8/8 8/8 E/- b/b"),
    (("0", "self_attn.o_proj"), "b/b b/b b/b 8/8 8/8 E/- b/b"),
    (("3", "self_attn.indexer.wq_b"), "b/b b/b b/b 8/8 8/8 E/- b/b"),
    (("3", "self_attn.kv_b_proj"), "b/b b/b b/b b/b b/b E/- b/b"),
    (("0", "mlp.gate_up_proj"), "b/b b/b b/b 4/8 8/8 E/- 4/b"),
    (("0", "mlp.down_proj"), "b/b b/b b/b 8/8 8/8 E/- b/b"),
    (("3", "mlp.shared_experts.gate_up_proj"), "b/b b/b b/b 4/8 8/8 E/- 4/b"),
    (("3", "mlp.shared_experts.down_proj"), "b/b b/b b/b 8/8 8/8 E/- b/b"),
    (("3", "mlp.experts.0.gate_proj"), "4/4 4/4 4/4 4/4 4/4 4/4 4/4"),
    (("3", "mlp.experts.0.down_proj"), "4/4 4/4 4/4 4/4 4/4 4/4 4/4"),
    (("mtp", "fused_a"), "b/b b/b b/b 4/4 8/8 E/- 4/4"),
    (("mtp", "self_attn.q_b_proj"), "b/b b/b b/b 8/8 8/8 E/- 4/4"),
    (("mtp", "self_attn.kv_b_proj"), "b/b b/b b/b b/b b/b E/- 4/4"),
    (("mtp", "mlp.shared_experts.gate_up_proj"), "b/b b/b b/b 4/4 8/8 E/- 4/4"),
    (("mtp", "mlp.shared_experts.down_proj"), "b/b b/b b/b 8/8 8/8 E/- 4/4"),
    (("mtp", "mlp.experts.0.up_proj"), "4/4 4/b b/b 4/4 4/4 4/4 4/4"),
]


def class_of(leaf: str, engine: str) -> str:
    if leaf == "fused_a":
        return FUSED_A_CLASS[engine]
    if ".experts." in leaf:
        return EXPERTS_CLASS[engine]
    last = leaf.rpartition(".")[2]
    return {"o_proj": ROW, "down_proj": ROW, "gate_up_proj": MERGED, "wq_b": REPLICATED}.get(last, COLUMN)


def answer(engine, name, class_name, targets, ignore, packed=None) -> str:
    """b ignored, 4 or 8 the scheme, - not quantized, E an error."""
    rules = ENGINES[engine]
    packed = rules.models["glm_moe_dsa"].packed if packed is None else packed
    try:
        if rules.matching.is_ignored(name, ignore, packed):
            return "b"
        target = rules.matching.find_target(name, class_name, targets, packed)
    except MatchError:
        return "E"
    return "-" if target is None else targets[target]


@pytest.mark.parametrize(
    ("module", "row"), TABLE, ids=lambda value: value if isinstance(value, str) else ".".join(value)
)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_outcome_table(engine, module, row):
    place, leaf = module
    prefix = LAYER[engine] if place == "mtp" else f"model.layers.{place}"
    name = f"{prefix}.self_attn.{FUSED_A[engine]}" if leaf == "fused_a" else f"{prefix}.{leaf}"
    packed = {} if (place, engine) == ("mtp", "vllm") else None
    column = ("sglang", "vllm").index(engine)
    wanted = [cell.split("/")[column] for cell in row.split()]
    class_name = class_of(leaf, engine)
    got = [answer(engine, name, class_name, *config, packed) for config in CONFIGS.values()]
    assert got == wanted


@pytest.mark.parametrize("leaf", ["fused_a", "mlp.shared_experts.gate_up_proj"])
def test_a_running_draft_of_vllm_has_the_fused_names_of_its_target(leaf):
    name = f"model.layers.78.self_attn.{FUSED_A['vllm']}" if leaf == "fused_a" else f"model.layers.78.{leaf}"
    assert answer("vllm", name, class_of(leaf, "vllm"), *CONFIGS["T4"]) == "8"


L5 = "model.layers.5."
IGNORES = [
    ("self_attn.kv_b_proj", L5 + "self_attn.kv_b_proj", "yes", "no"),
    ("model.layers.5.self_attn", L5 + "self_attn.kv_b_proj", "no", "no"),
    (r"re:.*mlp\.gate", L5 + "mlp.gate_up_proj", "yes", "yes"),
    ("re:self_attn", L5 + "self_attn.o_proj", "no", "no"),
    (r"re:.*fused_qkv_a_proj(_with_mqa)?$", L5 + "self_attn.FUSED", "no", "yes"),
    (r"re:.*\.(q_a_proj|kv_a_proj_with_mqa)$", L5 + "self_attn.FUSED", "yes", "yes"),
    (r"re:.*\.q_a_proj$", L5 + "self_attn.FUSED", "error", "error"),
    (L5 + "self_attn.FUSED", L5 + "self_attn.FUSED", "yes", "yes"),
    (r"re:.*shared_experts\.(gate|up)_proj$", L5 + "mlp.shared_experts.gate_up_proj", "no", "yes"),
    ("model.layers.5.mlp.experts", L5 + "mlp.experts.0.gate_proj", "no", "no"),
    (r"re:.*mlp\.experts\..*", L5 + "mlp.experts.0.gate_proj", "yes", "yes"),
    ("model.layers.5.mlp.experts.7.gate_proj", L5 + "mlp.experts.0.gate_proj", "no", "no"),
    ("language_model.model.layers.3.self_attn.o_proj", "K25.3.self_attn.o_proj", "no", "yes"),
    ("model.layers.3.self_attn.o_proj", "K25.3.self_attn.o_proj", "yes", "no"),
    ("re:.*self_attn.*", "K25.3.self_attn.o_proj", "yes", "yes"),
    (r"re:language_model\..*self_attn.*", "K25.3.self_attn.o_proj", "no", "yes"),
    ("Linear", L5 + "self_attn.o_proj", "no", "no"),
]


@pytest.mark.parametrize(("entry", "name", "sglang", "vllm"), IGNORES)
def test_single_ignore_entries(entry, name, sglang, vllm):
    for engine, wanted in (("sglang", sglang), ("vllm", vllm)):
        rules = ENGINES[engine]
        k25 = {"sglang": "model.layers", "vllm": "language_model.model.layers"}[engine]
        texts = [one.replace("FUSED", FUSED_A[engine]).replace("K25", k25) for one in (entry, name)]
        try:
            got = {True: "yes", False: "no"}[
                rules.matching.is_ignored(texts[1], [texts[0]], rules.models["glm_moe_dsa"].packed)
            ]
        except MatchError:
            got = "error"
        assert got == wanted, (engine, entry)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("target", ["Linear", "linear", "ReplicatedLinear", "re:.*Linear$", "Replicated"])
def test_a_target_hits_a_class_by_a_part_of_its_name(target, engine):
    assert answer(engine, L5 + "self_attn.indexer.wq_b", "ReplicatedLinear", {target: "4"}, []) == "4"


@pytest.mark.parametrize("target", ["nn.Linear", "re:Linear", "model.layers.5.self_attn.indexer"])
def test_what_hits_no_class_is_an_error_or_not_quantized(target):
    name = L5 + "self_attn.indexer.wq_b"
    assert answer("sglang", name, "ReplicatedLinear", {target: "4"}, []) == "E"
    assert answer("vllm", name, "ReplicatedLinear", {target: "4"}, []) == "-"


def test_experts_of_glm4_are_asked_for_without_fused_names():
    """SGLang's class declares none: only the literal spelling of the fused module counts."""
    name, targets = "model.layers.1.mlp.shared_experts.gate_up_proj", {"Linear": "4"}
    packed = SGLANG.models["glm4_moe"].packed
    entry = r"re:.*shared_experts\.(gate|up)_proj$"
    assert answer("sglang", name, MERGED, targets, [entry], packed) == "4"
    assert answer("sglang", name, MERGED, targets, ["re:.*shared_experts.*"], packed) == "b"


@pytest.mark.parametrize(
    "entry", [*I0, *_FP8_SAFE, "model.layers.3.self_attn.o_proj", r"re:.*mlp\.gate$", "re:self_attn"]
)
def test_names_that_no_engine_fuses_match_as_in_compressed_tensors(entry):
    """The library's own matcher; it treats fused names otherwise than either engine."""
    from compressed_tensors.utils.match import match_name

    leaves = ("self_attn.o_proj", "self_attn.q_b_proj", "mlp.down_proj", "mlp.gate", "mlp.experts.0.gate_proj")
    for name in [*(f"model.layers.{layer}.{leaf}" for layer in (0, 3) for leaf in leaves), "lm_head"]:
        for rules in ENGINES.values():
            is_suffix = rules is SGLANG and not entry.startswith("re:") and name.endswith(f".{entry}")
            assert rules.matching.is_ignored(name, [entry], {}) == (match_name(name, entry) or is_suffix)
