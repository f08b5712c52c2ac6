"""SGLang 0.5.23: what it builds of each architecture, how it matches names, and which schemes its layers take.

Read in source (`srt/models`, `srt/layers/quantization/compressed_tensors`, `srt/layers/linear.py`); matching and
what is said of copies were run on a processor.
"""

from collections.abc import Iterator

from quantkit.engines.matching import SGLANG_MATCHING
from quantkit.engines.runtime import (
    GQA,
    MERGED,
    MLA,
    MLP,
    QKV,
    REPLICATED,
    Build,
    EngineRules,
    ModelRules,
    RuntimeModule,
)
from quantkit.engines.schemes import PACK_QUANTIZED, Scheme, Section
from quantkit.families.config_values import Config, flag

_FUSED_QKV_A = "fused_qkv_a_proj_with_mqa"
_MLA = MLA | {leaf: Build(_FUSED_QKV_A, REPLICATED) for leaf in ("q_a_proj", "kv_a_proj_with_mqa")}
_FORMATS = (PACK_QUANTIZED, "naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized")


def _is_indexer_plain(leaf: str, config: Config) -> bool:
    """GLM's interleaved indexer fuses both in BF16; DeepSeek-V3.2's ``wk`` asks the config."""
    return leaf == "weights_proj" or (leaf == "wk" and flag(config, "indexer_rope_interleave", True))


def _deepseek_refuses(name: str) -> bool:
    """Parts of gate and up beside the experts; every other name that no parameter wants is passed over."""
    # the loader's own words: it looks for text, not for parts of a name
    return ".experts." not in name and (".gate_proj." in name or ".up_proj." in name)


def _deepseek(**changes: object) -> ModelRules:
    rules: dict[str, object] = {
        "builds": MLP | _MLA,
        "packed": {_FUSED_QKV_A: ("q_a_proj", "kv_a_proj_with_mqa")},
        "expert_class": "FusedMoE",
        "draft_root": "model.decoder",
        "is_plain": _is_indexer_plain,
        "refuses_unknown": _deepseek_refuses,
    }
    return ModelRules(**(rules | changes))  # type: ignore[arg-type]


def linear_errors(module: RuntimeModule, scheme: Scheme, section: Section) -> Iterator[str]:
    """Why a Linear cannot have this scheme, in the engine's words where it has any."""
    leaf = module.name.rpartition(".")[2]
    stored_as = scheme.format or section.format
    if scheme.is_int4 and scheme.activations is not None:
        yield "NotImplementedError: No compressed-tensors compatible scheme was found (INT4 with 8-bit activations)"
    elif not scheme.is_float and scheme.is_weight_only:
        if stored_as != PACK_QUANTIZED or scheme.num_bits not in (4, 8):
            yield f"ImportError: Other method (CompressedTensorsW4A16Sparse24) is not supported now ({stored_as})"
        if leaf == _FUSED_QKV_A:
            yield "AssertionError: the weight_shape tensors of both projections are put together, [4] into [2]"
        if leaf == "kv_b_proj":
            yield "AttributeError: kv_b_proj is read as .weight after loading, which packed INT4 has not"
    elif scheme.is_float:
        if stored_as not in _FORMATS:
            yield f"NotImplementedError: No compressed-tensors compatible scheme was found (format {stored_as})"
        linear = section.targets.get("Linear")
        if scheme.block is not None and (linear is None or linear.block is None):
            if module.class_name in (MERGED, QKV):
                yield (
                    "TypeError: 'NoneType' object is not subscriptable: fused layers take the block size from the "
                    "target Linear, which has none"
                )
            if leaf == "kv_b_proj":
                yield "kv_b_proj is decoded with the block size of the target Linear, which has none"


def expert_errors(scheme: Scheme, section: Section) -> Iterator[str]:
    """Why routed experts cannot have this scheme."""
    if scheme.is_float:
        if scheme.is_weight_only:
            yield "RuntimeError: Unsupported FusedMoe scheme (FP8 weights without FP8 activations)"
        return
    if section.format != PACK_QUANTIZED or scheme.num_bits not in (4, 8):
        yield (
            "ValueError: For Fused MoE layers, only pack-quantized is supported for the following bits: [4, 8] "
            f"(the top level says {section.format})"
        )
    if not scheme.is_symmetric:
        yield "asymmetric experts: zero points are not transposed by the loader, and the copy fails on their shape"
    if scheme.actorder not in (None, "static", False):
        yield f"actorder {scheme.actorder!r}: scales of down_proj would be read unsharded"
    if scheme.is_w4a8 and "Linear" not in section.targets:
        yield "KeyError: 'Linear': the W4A8 experts take their group size from that target"
    if scheme.is_w4a8 and scheme.group_size != 128:
        yield f"the W4A8 kernel has groups of 128, not {scheme.group_size}, and does not look"


def fuses_shared_experts(family: str, num_experts: int, num_shared: int, section: Section, *, ep: int) -> bool:
    """Whether the shared expert becomes a routed one, unless ``--disable-shared-experts-fusion`` is given."""
    if ep > 1 or section.method == "w4afp8":
        return False
    if family == "glm4_moe":
        return num_shared > 0
    if family not in ("glm_moe_dsa", "deepseek_v3") or num_experts != 256 or num_shared != 1:
        return False
    linear = section.targets.get("Linear")
    is_int4 = linear is not None and linear.is_int4 and linear.is_symmetric and section.format == PACK_QUANTIZED
    return not is_int4


SGLANG = EngineRules(
    name="sglang",
    version="0.5.23",
    matching=SGLANG_MATCHING,
    models={
        "glm_moe_dsa": _deepseek(),
        "deepseek_v3": _deepseek(draft_renames=(("model.layers.61", "model.decoder"),)),
        "deepseek_v32": _deepseek(draft_renames=(("model.layers.61", "model.decoder"),)),
        "kimi_k25": _deepseek(
            layer_root="model.", renames=(("language_model.layers.", "language_model.model.layers."),)
        ),
        "glm4_moe": ModelRules(
            builds=MLP | GQA,
            packed={},
            expert_class="FusedMoE",
            draft_root="model.decoder",
            refuses_unknown=lambda _name: False,
        ),
    },
    linear_errors=linear_errors,
    expert_errors=expert_errors,
    reads_w4afp8=True,
    reads_native_linears=True,
)
