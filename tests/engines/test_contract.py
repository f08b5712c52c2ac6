"""What loads, what an engine refuses, and what loads silently wrong: made checkpoints, known breakages, all splits."""

from dataclasses import dataclass, field

import pytest

from quantkit.engines.check import RULES, check_engine
from quantkit.engines.contract import Contract
from quantkit.engines.launch import NO_FUSION, Launch
from quantkit.engines.parallel import Parallel
from quantkit.engines.runtime import Kind, RuntimeModule
from quantkit.engines.schemes import native_fp8_parts, plain_parts, read_section, w4afp8_parts
from quantkit.engines.sglang import fuses_shared_experts
from quantkit.engines.verdicts import Outcome
from quantkit.families import FAMILIES
from quantkit.families.family import Role
from quantkit.tensors import BF16, F8_E4M3, F32, I32, TensorSpec
from tests.tiny import tiny_config

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [128, 128]}
FP8_INPUT = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
TOKEN_INPUT = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
REST = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
_ATTENTION = (
    r"re:.*self_attn\.(fused_qkv_a_proj(_with_mqa)?|q_a_proj|kv_a_proj_with_mqa|q_b_proj|o_proj|indexer\.wq_b)$"
)
V3 = [_ATTENTION, r"re:.*mlp\.(shared_experts\.)?(gate_up_proj|gate_proj|up_proj|down_proj)$"]
V3M = [_ATTENTION, r"re:.*mlp\.(shared_experts\.)?down_proj$"]
GATE_UP = r"re:.*mlp\.(shared_experts\.)?(gate_up|gate|up)_proj$"


def group(targets, weights, *, inputs=None, stored_as="pack-quantized"):
    return {"targets": targets, "weights": weights, "input_activations": inputs, "format": stored_as}


def section(groups, ignore, **more):
    document = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ignore}
    return document | {"config_groups": {f"group_{i}": one for i, one in enumerate(groups)}} | more


def only_experts(**weights):
    return section([group(["Linear"], INT4 | weights)], REST)


@dataclass
class Case:
    """A checkpoint as names and specs. ``forms``: how each role is stored; what is not named stays BF16."""

    model_type: str = "glm_moe_dsa"
    document: dict = field(default_factory=only_experts)
    forms: dict = field(default_factory=lambda: {Role.ROUTED_EXPERT: "int4"})
    changes: dict = field(default_factory=dict)

    def __post_init__(self):
        self.config = tiny_config(self.model_type, **self.changes)
        if self.document is not None:
            self.config["quantization_config"] = self.document
        self.family = next(one for one in FAMILIES.values() if self.model_type in one.model_types)
        self.root = self.family.text_root
        int4 = next((one for one in read_section(self.document or {}).schemes if one.is_int4), None)
        self.stored = {}
        for tensor in self.family.expected_tensors(self.config):
            module, _, leaf = tensor.name.rpartition(".")
            form = next(
                (form for key, form in self.forms.items() if key in (tensor.role, tensor.name.split(".")[-2])), ""
            )
            if leaf != "weight" or len(tensor.shape) != 2 or not form:
                self.stored[tensor.name] = TensorSpec(tensor.dtype, tensor.shape)
                continue
            parts = {
                "int4": int4 and int4.parts,
                "native": native_fp8_parts,
                "fp8": lambda *shape: {
                    "weight": native_fp8_parts(*shape)["weight"],
                    "weight_scale": native_fp8_parts(*shape)["weight_scale_inv"],
                },
                "w4afp8": w4afp8_parts,
                "plain": plain_parts,
            }[form](*tensor.shape)
            for one, part in parts.items():
                if part.shape is not None and not part.optional:
                    self.stored[f"{module}.{one}"] = TensorSpec(part.dtypes[0], part.shape)

    def check(self, engine, *, tp=None, ep=1, backend="none", flags=()):
        parallel = None if tp is None else Parallel(tp=tp, ep=ep)
        launch = Launch(engine=engine, parallel=parallel, backend=backend, flags=flags)
        return check_engine(self.family, self.config, self.stored, launch, root=self.root)

    def found(self, engine, **launch):
        """Modules that do not load: their outcomes by name."""
        rows = self.check(engine, **launch).rows
        return {row.name: row.example.outcome for row in rows if row.example.outcome is not Outcome.LOADS}

    def messages(self, engine, **launch):
        return " | ".join(row.example.message for row in self.check(engine, **launch).rows if row.example.message)


MTP = {"num_nextn_predict_layers": 1}
ENGINES = ("sglang", "vllm")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "model_type", ["glm_moe_dsa", "glm4_moe", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25"]
)
def test_int4_experts_and_the_rest_in_bf16_load_everywhere(model_type, engine):
    changes = {} if model_type.startswith("kimi") else MTP
    case = Case(model_type, changes=changes)
    assert case.found(engine, flags=(NO_FUSION,)) == {}
    experts = [row for row in case.check(engine).rows if row.name.endswith("mlp.experts")]
    assert {row.example.scheme for row in experts} == {"INT4 in groups of 32"}


def test_a_draft_that_only_one_spelling_of_its_name_ignores():
    """INT4 in the files: SGLang asks for model.decoder, vLLM for the layer's number."""
    case = Case(changes=MTP, document=section([group(["Linear"], INT4)], [*REST, r"re:model\.layers\.2\..*"]))
    assert case.found("sglang") == {}
    assert case.found("vllm") == {"model.layers.2.mlp.experts": Outcome.REFUSED}
    entry = r"re:model\.(layers\.2|decoder)\..*"
    both = Case(changes=MTP, document=section([group(["Linear"], INT4)], [*REST, entry]))
    assert both.found("sglang") == {"model.decoder.mlp.experts": Outcome.SILENT}
    kept = Case(changes=MTP, document=section([group(["Linear"], INT4)], [*REST, entry]))
    for name in [name for name in kept.stored if name.startswith("model.layers.2.mlp.experts")]:
        module, _, leaf = name.rpartition(".")
        del kept.stored[name]
        if leaf == "weight_shape":
            rows = 256 if "down" in name else 128
            kept.stored[f"{module}.weight"] = TensorSpec(BF16, (rows, 384 - rows))
    assert kept.found("sglang") == kept.found("vllm") == {}


FP8_ROLES = dict.fromkeys((Role.ATTENTION, Role.INDEXER, Role.SHARED_EXPERT, Role.DENSE_MLP), "fp8")


def two_groups(targets, ignore):
    fp8 = group(targets, FP8, inputs=FP8_INPUT, stored_as="float-quantized")
    return section([group(["Linear"], INT4), fp8], ["lm_head", "re:.*kv_b_proj$", *ignore])


def test_fp8_blocks_everywhere_but_in_experts_end_sglang_at_a_fused_layer():
    case = Case(document=two_groups(V3, []), forms=FP8_ROLES | {Role.ROUTED_EXPERT: "int4"})
    assert case.found("vllm") == {}
    assert case.found("sglang") == {
        "model.layers.0.mlp.gate_up_proj": Outcome.REFUSED,
        "model.layers.1.mlp.shared_experts.gate_up_proj": Outcome.REFUSED,
    }
    assert "TypeError: 'NoneType' object is not subscriptable" in case.messages("sglang")


@pytest.mark.parametrize("engine", ENGINES)
def test_fp8_blocks_with_gate_and_up_in_bf16_load_in_both(engine):
    forms = {"gate_proj": "", "up_proj": ""}
    case = Case(document=two_groups(V3M, [GATE_UP]), forms={Role.ROUTED_EXPERT: "int4"} | forms | FP8_ROLES)
    assert case.found(engine) == {}


def test_fp8_as_the_linear_target_drops_the_shared_expert():
    """It is fused into the routed ones, unless the server is told not to."""
    experts = group([r"re:.*mlp\.experts\..*"], INT4)
    fp8 = group(["Linear"], FP8, inputs=FP8_INPUT, stored_as="float-quantized")
    document = section([experts, fp8], ["lm_head", "re:.*kv_b_proj$"])
    case = Case(document=document, forms=FP8_ROLES | {Role.ROUTED_EXPERT: "int4"}, changes={"n_routed_experts": 256})
    assert case.found("vllm") == case.found("sglang", flags=(NO_FUSION,)) == {}
    assert case.found("sglang") == {"mlp.shared_experts": Outcome.FLAG}
    read = read_section(document)
    assert fuses_shared_experts("glm_moe_dsa", 256, 1, read, ep=1)
    assert not fuses_shared_experts("glm_moe_dsa", 256, 1, read, ep=8)
    assert not fuses_shared_experts("glm_moe_dsa", 384, 1, read, ep=1)


def test_glm4_fuses_the_shared_expert_whatever_it_is_stored_as():
    case = Case("glm4_moe")
    assert case.found("sglang") == {"mlp.shared_experts": Outcome.FLAG}
    assert case.found("sglang", flags=(NO_FUSION,)) == case.found("vllm") == {}


def test_asymmetric_experts_are_for_vllm():
    case = Case(document=only_experts(symmetric=False))
    assert any(name.endswith("weight_zero_point") for name in case.stored)
    assert case.found("vllm") == {}
    assert case.found("sglang") == {"model.layers.1.mlp.experts": Outcome.REFUSED}


def test_zero_points_that_the_config_does_not_declare_are_passed_over():
    case = Case()
    case.stored["model.layers.1.mlp.experts.3.up_proj.weight_zero_point"] = TensorSpec(I32, (16, 8))
    assert case.found("sglang") == {"model.layers.1.mlp.experts": Outcome.SILENT}
    assert case.found("vllm") == {"model.layers.1.mlp.experts": Outcome.REFUSED}


@pytest.mark.parametrize("engine", ENGINES)
def test_projections_of_one_layer_in_two_schemes(engine):
    case = Case(document=section([group(["Linear"], INT4)], [*REST, r"re:.*experts\.\d+\.down_proj$"]))
    assert "All MoE projections need to have same quantization scheme" in case.messages(engine)
    assert case.found(engine) == {"model.layers.1.mlp.experts": Outcome.REFUSED}


def test_packed_kv_b_and_query_projections_are_for_vllm():
    ignore = ["lm_head", "re:.*indexer.*", r"re:.*self_attn\.(q_b|o)_proj", *REST[2:]]
    forms = dict.fromkeys((Role.ROUTED_EXPERT, Role.KV_B), "int4") | {
        "q_a_proj": "int4",
        "kv_a_proj_with_mqa": "int4",
    }
    case = Case(document=section([group(["Linear"], INT4)], ignore), forms=forms)
    assert case.found("vllm") == {}
    assert set(case.found("sglang")) == {
        f"model.layers.{{0-1}}.self_attn.{leaf}" for leaf in ("kv_b_proj", "fused_qkv_a_proj_with_mqa")
    }
    assert "AttributeError: kv_b_proj" in case.messages("sglang")


def test_names_that_a_fused_module_does_not_have():
    """llm-compressor lists what it left alone by exact, unfused names: SGLang never looks at those of gate and up."""
    leaves = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj", "indexer.wq_b")
    names = [f"model.layers.{layer}.self_attn.{leaf}" for layer in (0, 1) for leaf in leaves]
    mlps = ("model.layers.0.mlp", "model.layers.1.mlp.shared_experts")
    names += [f"{mlp}.{one}_proj" for mlp in mlps for one in ("gate", "up", "down")]
    case = Case(document=section([group(["Linear"], INT4)], ["lm_head", *names]))
    assert case.found("vllm") == {}
    assert case.found("sglang") == {f"{mlp}.gate_up_proj": Outcome.REFUSED for mlp in mlps}
    assert "KeyError: no parameter wants this tensor, as INT4" in case.messages("sglang")


def test_a_linear_without_a_target_is_an_error_in_sglang_alone():
    case = Case(document=section([group([r"re:.*mlp\.experts\..*"], INT4)], ["lm_head"]))
    assert case.found("vllm") == {}
    assert set(case.found("sglang", flags=(NO_FUSION,)).values()) == {Outcome.REFUSED}
    assert "Unable to find matching target" in case.messages("sglang")


@pytest.mark.parametrize(
    ("leaf", "spec", "sglang", "vllm"),
    [
        ("q_b_proj", TensorSpec(F8_E4M3, (256, 128)), Outcome.SILENT, Outcome.SILENT),
        ("o_proj", TensorSpec(BF16, (128, 256)), Outcome.REFUSED, Outcome.REFUSED),
        ("o_proj", None, Outcome.SILENT, Outcome.SILENT),
    ],
)
def test_one_tensor_that_is_not_what_its_parameter_wants(leaf, spec, sglang, vllm):
    name = f"model.layers.1.self_attn.{leaf}.weight"
    for engine, wanted in (("sglang", sglang), ("vllm", vllm)):
        case = Case()
        del case.stored[name]
        if spec is not None:
            case.stored[name] = spec
        assert case.found(engine) == {f"model.layers.1.self_attn.{leaf}": wanted}
        row = case.check(engine).rows[0]
        assert row.example.tensor == name
        assert row.example.remedy


def test_bf16_where_the_config_says_fp8():
    """SGLang's column-parallel layers refuse to cast down, the others cast in silence."""
    document = two_groups(V3M, [GATE_UP])
    forms = {Role.ROUTED_EXPERT: "int4", "gate_proj": "", "up_proj": "", "q_b_proj": "plain", "o_proj": "plain"}
    case = Case(document=document, forms=forms | FP8_ROLES)
    assert case.found("sglang") == {
        "model.layers.{0-1}.self_attn.q_b_proj": Outcome.REFUSED,
        "model.layers.{0-1}.self_attn.o_proj": Outcome.SILENT,
    }
    assert "Downcasting not allowed" in case.messages("sglang")
    assert set(case.found("vllm").values()) == {Outcome.SILENT}


def test_leftovers_of_the_source_end_vllm():
    case = Case()
    case.stored["model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"] = TensorSpec(F32, (1, 2))
    assert case.found("sglang") == {}
    assert case.found("vllm") == {"model.layers.1.mlp.experts": Outcome.REFUSED}


NATIVE = dict.fromkeys((Role.ATTENTION, Role.KV_B, Role.INDEXER, Role.SHARED_EXPERT, Role.DENSE_MLP), "native")


def test_w4afp8_is_sglangs():
    forms = NATIVE | {Role.ROUTED_EXPERT: "w4afp8"}
    case = Case(document={"quant_method": "w4afp8"}, forms=forms, changes=MTP)
    assert case.found("sglang", tp=1, backend="deepep") == {}
    assert case.found("vllm") == {"quantization_config": Outcome.REFUSED}
    case.stored = {name: spec for name, spec in case.stored.items() if "layers.2.mlp.experts" not in name}
    assert case.found("sglang") == {"model.decoder.mlp.experts": Outcome.SILENT}


def test_native_linears_beside_packed_experts_are_sglangs():
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    document = section([group(["Linear"], INT4)], REST, linear_fp8_config=fp8)
    case = Case(document=document, forms=NATIVE | {Role.ROUTED_EXPERT: "int4"})
    assert case.found("sglang") == {}
    assert Outcome.REFUSED in case.found("vllm").values()


def test_activations_in_fp8_want_groups_of_128():
    for size, wanted in ((128, {}), (32, {"model.layers.1.mlp.experts": Outcome.REFUSED})):
        document = section([group(["Linear"], INT4 | {"group_size": size}, inputs=TOKEN_INPUT)], REST)
        case = Case(document=document)
        assert case.found("sglang") == case.found("vllm") == wanted
    document = section([group(["Linear"], INT4 | {"group_size": 128}, inputs=TOKEN_INPUT)], REST[:2])
    assert "No compressed-tensors compatible scheme" in Case(document=document).messages("sglang")


@pytest.mark.parametrize("backend", ["deepep", "mooncake"])
def test_backends_between_experts_have_no_kernel_for_packed_ones(backend):
    assert Case().found("sglang", tp=1, backend=backend) == {"mlp.experts": Outcome.REFUSED}
    assert Case().found("sglang", tp=1) == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ignore": None}, "not a list of names"),
        ({"linear_fp8_config": None}, "linear_fp8_config is no object"),
        ({"sparsity_config": {"targets": ["Linear"]}}, "sparse weights"),
        ({"config_groups": {"g": {"targets": ["Linear"], "weights": INT4 | {"kernel": "x"}}}}, "unknown key kernel"),
        ({"config_groups": {"g": {"targets": ["Linear"], "weights": None}}}, "has no weights"),
        ({"config_groups": {"g": {"targets": "Linear", "weights": INT4}}}, "targets is not a list"),
        ({"config_groups": {"g": {"targets": ["Linear"], "weights": INT4 | {"observer_kwargs": None}}}}, "is null"),
        (
            {"config_groups": {"g": {"targets": ["Linear"], "weights": INT4 | {"block_structure": [1, 1]}}}},
            "strategy group",
        ),
    ],
)
def test_a_config_that_ends_the_servers_start(change, words):
    for engine in ENGINES:
        case = Case()
        case.config["quantization_config"] = only_experts() | change
        assert case.check(engine).worst is Outcome.REFUSED
        assert words in case.messages(engine)


def test_the_format_of_experts_is_read_at_the_top_by_one_and_in_the_group_by_the_other():
    document = only_experts() | {"format": "mixed-precision"}
    assert "only pack-quantized is supported" in Case(document=document).messages("sglang")
    assert Case(document=document).found("vllm") == {}
    del document["config_groups"]["group_0"]["format"]
    assert Outcome.REFUSED in Case(document=document).found("vllm").values()


@pytest.mark.parametrize("method", ["gptq", "awq", "auto-round", "fp8", "modelopt"])
def test_what_is_not_stated_here_is_unknown_and_never_good(method):
    case = Case()
    case.config["quantization_config"] = {"quant_method": method}
    assert case.check("vllm").worst is Outcome.UNKNOWN
    assert case.check("sglang").worst is (Outcome.REFUSED if method == "gptq" else Outcome.UNKNOWN)
    assert Case("qwen3_moe").check("vllm").worst is Outcome.UNKNOWN


WIDTH = {"hidden_size": 1024, "num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 6144}
SPLITS = [
    # expert width, group, TP, EP: SGLang, vLLM
    (2048, 32, 8, 1, "", ""),
    (2048, 64, 16, 1, "", ""),
    (2048, 128, 8, 1, "", ""),
    (2048, 128, 16, 1, "", ""),
    (2048, 32, 32, 1, "", ""),
    (2048, 64, 32, 1, "", ""),
    (2048, 128, 32, 1, "silent", "refused"),  # 64 columns: no group at all
    (2048, 128, 32, 32, "", ""),
    (1536, 128, 4, 1, "", ""),
    (1536, 64, 8, 1, "", ""),
    (1536, 128, 8, 1, "silent", "refused"),  # 192 columns: one group, taken for the whole row
    (1536, 128, 8, 8, "", ""),
    (1408, 128, 1, 1, "", ""),
    (1408, 128, 2, 1, "refused", "refused"),  # 704 columns: five groups do not divide them
    (1408, 32, 8, 1, "refused", "refused"),  # 176 columns: 352 rows are no whole tiles
    (2048, 32, 48, 1, "refused", "refused"),  # heads
]


@pytest.mark.parametrize(("width", "size", "tp", "ep", "sglang", "vllm"), SPLITS)
def test_every_split(width, size, tp, ep, sglang, vllm):
    changes = WIDTH | {"moe_intermediate_size": width, "n_routed_experts": 32}
    case = Case("deepseek_v3", document=only_experts(group_size=size), changes=changes)
    names = {"": [], "silent": [Outcome.SILENT], "refused": [Outcome.REFUSED]}
    assert list(case.found("sglang", tp=tp, ep=ep).values()) == names[sglang], case.messages("sglang", tp=tp, ep=ep)
    assert list(case.found("vllm", tp=tp, ep=ep).values()) == names[vllm], case.messages("vllm", tp=tp, ep=ep)


def test_indexers_of_layers_that_reuse_a_choice_end_vllm():
    """A checkpoint may carry them; SGLang passes them over."""
    case = Case(changes={"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]})
    spare = "model.layers.1.self_attn.indexer.wq_b.weight"
    assert spare in case.stored
    assert set(case.found("vllm")) == {
        f"model.layers.1.self_attn.indexer.{leaf}" for leaf in ("wq_b", "wk", "weights_proj")
    }
    assert case.found("sglang") == {}
    case.stored = {name: spec for name, spec in case.stored.items() if "layers.1.self_attn.indexer" not in name}
    assert case.found("vllm") == {}


@pytest.mark.parametrize(
    ("target", "sglang", "vllm"),
    [("lm_head", True, True), ("re:.*head$", True, True), ("head", False, False), ("inner_head", True, False)],
)
def test_a_head_is_quantized_where_a_target_names_it(target, sglang, vllm):
    """SGLang also takes what stands behind a dot of its name."""
    document = section([group(["Linear"], INT4), group([target], INT4 | {"group_size": 64})], REST[1:])
    for engine, wanted in (("sglang", sglang), ("vllm", vllm)):
        contract = Contract(
            rules=RULES[engine], model=RULES[engine].models["glm4_moe"], section=read_section(document), leaves={}
        )
        name = "model.inner_head" if target == "inner_head" else "lm_head"
        scheme = contract.scheme_of(RuntimeModule(name=name, class_name="ParallelLMHead", kind=Kind.HEAD))
        assert (scheme is not None) == wanted
