"""Scales of an FP8 KV cache in a checkpoint: under which names an engine finds them, and what it does with them.

Read in source: SGLang 0.5.23 (`models/deepseek_common`, `glm4_moe`, `glm4_moe_lite`, `qwen3_moe`,
`layers/quantization/kv_cache.py`), vLLM 0.33.0 (`model_loader/weight_utils.py`). Rows of sparse attention (656 bytes)
carry scales of their own, and others go unused.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quantkit.engines.parallel import EngineName
from quantkit.engines.schemes import Section
from quantkit.engines.verdicts import ModuleVerdict, Outcome

KEY_LEAF, VALUE_LEAF = "k_scale", "v_scale"
SCALE_LEAVES = (f".{KEY_LEAF}", f".{VALUE_LEAF}")
STATIC_KV_SCHEME: Mapping[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
"""The only ``kv_cache_scheme`` that SGLang reads scales for."""

_LATENT_NAMES = re.compile(r"self_attn\.(?:k_proj\.k_scale|v_proj\.v_scale|attn_mqa\.[kv]_scale)$")
_LITE_NAMES = re.compile(r"self_attn\.attn_mqa\.[kv]_scale$")  # its loader garbles the other two
_SPARSE = frozenset({"glm_moe_dsa", "deepseek_v32"})
_LATENT = _SPARSE | {"deepseek_v3", "kimi_k25", "glm4_moe_lite"}
_MODULE = "self_attn (KV scales)"
_PLACES = (".attn_mqa", ".attn", ".k_proj", ".v_proj", ".qkv_proj")  # that may stand before a scale's own name


def scale_of(name: str) -> str:
    """Which scale of which attention module a stored name means: engines have one attribute for all its names."""
    module, _, leaf = name.rpartition(".")
    place = next((one for one in _PLACES if module.endswith(one)), "")
    return f"{module.removesuffix(place)}.{leaf}"


def kv_scale_verdicts(
    family: str, names: Iterable[str], section: Section, engine: EngineName
) -> Iterator[ModuleVerdict]:
    """What becomes of stored KV scales, and of a scheme for them that no scale answers."""
    found = [name for name in names if name.endswith(SCALE_LEAVES)]
    if section.kv_cache and not found:
        yield _said(Outcome.LOADS, "kv_cache_scheme is declared and no scale is there: 1.0 is taken", None)
    if not found:
        return
    if engine == "vllm":
        if family in _LATENT:
            yield _said(Outcome.LOADS, "vLLM drops KV scales of latent attention: 1.0 is taken", found[0])
        else:
            yield from _twice(found)
        return
    names_read = _LITE_NAMES if family == "glm4_moe_lite" else _LATENT_NAMES
    # attention with heads is built without the quantization config there, and has no parameter for them
    is_built = family in _LATENT and _is_static(section.kv_cache)
    read = [name for name in found if is_built and names_read.search(name) is not None]
    if not read:
        yield _said(Outcome.LOADS, "SGLang passes these KV scales over: 1.0 is taken", found[0])
        return
    yield from _twice(read)
    first = read[0]
    if family in _SPARSE:
        message = (
            "rows of sparse attention carry scales of their own: these are never used, but by trtllm (Blackwell), "
            "which multiplies by them where it reads and does not divide where it writes"
        )
        yield _said(Outcome.FLAG, message, first, "leave the scales out")
    else:
        message = (
            "a KV scale other than 1 is multiplied when flashmla or trtllm_mla reads, and not divided by when it writes"
        )
        remedy = "use another --attention-backend than these, or leave the scales out"
        yield _said(Outcome.FLAG, message, first, remedy)


def _twice(names: Iterable[str]) -> Iterator[ModuleVerdict]:
    """Of scales that an engine finds under two names."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(scale_of(name), name)
        if other != name:
            message = f"a KV scale has two names here ({other} is the other): which is loaded last is not stated"
            yield _said(Outcome.UNKNOWN, message, name, "keep one of them; quantkit kv-scales says whether they differ")
            return


def _is_static(scheme: Any) -> bool:
    """Whether SGLang reads scales for it."""
    if not isinstance(scheme, Mapping):
        return False
    return all(scheme.get(key, value) == value for key, value in STATIC_KV_SCHEME.items()) and (
        scheme.get("type") == "float"
    )


def _said(outcome: Outcome, message: str, tensor: str | None, remedy: str = "") -> ModuleVerdict:
    return ModuleVerdict(module=_MODULE, outcome=outcome, message=message, tensor=tensor, remedy=remedy)
