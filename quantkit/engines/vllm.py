"""vLLM 0.33.0: what it builds of each architecture, how it matches names, and which schemes its layers take.

Read in source (`model_executor/models`, `models/deepseek_v32`, `layers/quantization/compressed_tensors`); matching
was run on a processor. A draft is given the target's own configuration object, and with it the target's fused names.
"""

from collections.abc import Iterator

from quantkit.engines.matching import VLLM_MATCHING
from quantkit.engines.runtime import GQA, MLA, MLP, Build, EngineRules, ModelRules, RuntimeModule
from quantkit.engines.schemes import PACK_QUANTIZED, Scheme, Section

_FUSED_QKV_A = "fused_qkv_a_proj"
_QKV_A_CLASS = "DeepSeekV2FusedQkvAProjLinear"
_MLA = MLA | {leaf: Build(_FUSED_QKV_A, _QKV_A_CLASS) for leaf in ("q_a_proj", "kv_a_proj_with_mqa")}
_GATE_UP = {"gate_up_proj": ("gate_proj", "up_proj")}
_DEEPSEEK = ModelRules(
    builds=MLP | _MLA,
    packed=_GATE_UP | {_FUSED_QKV_A: ("q_a_proj", "kv_a_proj_with_mqa")},
    expert_class="RoutedExperts",
    is_plain=lambda leaf, _config: leaf in ("wk", "weights_proj"),
    refuses_spare_indexers=True,
)
_KIMI_K25 = ModelRules(
    builds=_DEEPSEEK.builds,
    packed=_DEEPSEEK.packed,
    expert_class="RoutedExperts",
    renames=(("language_model.layers.", "language_model.model.layers."),),
)
_GLM4 = ModelRules(
    builds=MLP | GQA,
    packed=_GATE_UP | {"qkv_proj": ("q_proj", "k_proj", "v_proj")},
    expert_class="RoutedExperts",
)


def linear_errors(module: RuntimeModule, scheme: Scheme, section: Section) -> Iterator[str]:
    """Why a Linear cannot have this scheme, in the engine's words where it has any."""
    stored_as = scheme.format or section.format
    is_unknown = scheme.is_float and stored_as == PACK_QUANTIZED
    is_unknown |= not scheme.is_float and scheme.is_weight_only and stored_as != PACK_QUANTIZED
    if is_unknown:
        yield (
            f"NotImplementedError: No compressed-tensors compatible scheme was found for layer_name={module.name} "
            f"({scheme}, format {stored_as})"
        )
    if scheme.is_w4a8 and scheme.group_size != 128:
        yield "ValueError: W4A8 kernels require group quantization with group size 128"


def expert_errors(scheme: Scheme, section: Section) -> Iterator[str]:
    """Why routed experts cannot have this scheme."""
    stored_as = scheme.format or section.format
    if scheme.is_float:
        if scheme.is_weight_only:
            yield "RuntimeError: Unsupported FusedMoe scheme (FP8 weights without FP8 activations)"
        return
    if stored_as != PACK_QUANTIZED:
        yield f"ValueError: For Fused MoE layers, only pack-quantized is supported (format {stored_as})"
    if scheme.actorder in ("group", "dynamic", True):
        yield f"ValueError: actorder {scheme.actorder!r} is not supported for experts"
    if scheme.is_w4a8 and (scheme.group_size != 128 or not scheme.is_symmetric):
        yield "W4A8 experts are symmetric in groups of 128"


VLLM = EngineRules(
    name="vllm",
    version="0.33.0",
    matching=VLLM_MATCHING,
    models={
        "glm_moe_dsa": _DEEPSEEK,
        "deepseek_v3": _DEEPSEEK,
        "deepseek_v32": _DEEPSEEK,
        "kimi_k25": _KIMI_K25,
        "glm4_moe": _GLM4,
    },
    linear_errors=linear_errors,
    expert_errors=expert_errors,
)
