"""Names, shapes and config sections of KV scales, as each consumer reads them.

Engines do not agree, and neither do models of one engine. With heads, vLLM and those models of SGLang that take scales
at all find llm-compressor's ``self_attn.k_scale``; with latent attention every model of SGLang takes
``self_attn.attn_mqa.k_scale`` as it stands, while its loaders garble or drop the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.engines.kv_scales import HEAD_STRATEGY, KEY_LEAF, STATIC_KV_SCHEME, VALUE_LEAF
from quantkit.engines.kv_use import KvScales


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScales:
    """[1] one scale of a layer, or [H] one for each KV head. ``module``: of its attention, in the checkpoint."""

    layer: int
    module: str
    k: NDArray[np.float32]
    v: NDArray[np.float32]


def scale_tensors(layers: Sequence[LayerScales], kind: KvScales) -> dict[str, NDArray[np.float32]]:
    """By name. Scalars in ModelOpt's spelling, [1] or [H, 1, 1] in that of compressed-tensors."""
    key, value = _leaves(kind)
    shape = () if kind.spelling == "modelopt" else (1,)
    tensors = {}
    for one in layers:
        for leaf, scales in ((key, one.k), (value, one.v)):
            is_each = kind.scope == "head"
            tensors[f"{one.module}.{leaf}"] = scales.reshape(-1, 1, 1) if is_each else scales.reshape(shape)
    return tensors


def _leaves(kind: KvScales) -> tuple[str, str]:
    if kind.place == "k_proj":
        return f"k_proj.{KEY_LEAF}", f"v_proj.{VALUE_LEAF}"
    prefix = f"{kind.place}." if kind.place else ""
    return f"{prefix}{KEY_LEAF}", f"{prefix}{VALUE_LEAF}"


def config_section(kind: KvScales) -> dict[str, Any]:
    """What the ``quantization_config`` must say beside what it says already."""
    if kind.spelling == "modelopt" and kind.method != "compressed-tensors":  # whose readers want a whole scheme
        # either key is read, by engine and version
        return {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, "kv_cache_quant_algo": "FP8"}
    strategy = HEAD_STRATEGY if kind.scope == "head" else "tensor"
    return {"kv_cache_scheme": {**STATIC_KV_SCHEME, "strategy": strategy}}


def sglang_document(layers: Sequence[LayerScales], kind: KvScales, *, tp: int) -> Mapping[str, Any]:
    """``--quantization-param-path``: one number a layer for k and v, the larger, for each rank alike."""
    factors = {str(one.layer): float(max(one.k.max(), one.v.max())) for one in layers}
    return {
        "model_type": kind.model_type,
        "kv_cache": {
            "dtype": "float8_e4m3fn",
            "scaling_factor": {str(rank): dict(factors) for rank in range(tp)},
        },
    }
