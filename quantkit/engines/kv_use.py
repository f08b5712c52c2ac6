"""What becomes of calibrated FP8 KV scales: by engine, attention backend, kind of attention and spelling.

Read in source of SGLang 0.5.23 and vLLM 0.33.0; a backend that is not listed is not stated. Two things must come
together: the scale has to arrive (names, schemes, loaders), and the backend has to divide by it where it writes the
cache and to multiply where it reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from quantkit.engines.parallel import EngineName
from quantkit.families.kv_shape import KvShape, LatentKv

KvSpelling = Literal["compressed-tensors", "modelopt", "sglang"]
KV_SPELLINGS: tuple[KvSpelling, ...] = ("compressed-tensors", "modelopt", "sglang")
KvScope = Literal["tensor", "head"]
KV_SCOPES: tuple[KvScope, ...] = ("tensor", "head")
KvPlace = Literal["k_proj", "qkv_proj", "attn", "attn_mqa", ""]


class Attention(StrEnum):
    """What a cache holds of a token: heads, a latent row, or a latent row that an indexer chooses from."""

    GROUPED = "grouped-query attention"
    LATENT = "latent attention (MLA)"
    SPARSE = "sparse latent attention (DSA)"

    @classmethod
    def of(cls, shape: KvShape) -> "Attention":
        if shape.is_sparse:
            return cls.SPARSE
        return cls.LATENT if isinstance(shape, LatentKv) else cls.GROUPED


class KvUse(StrEnum):
    """``harmful``: a scale other than 1 makes attention wrong. ``refused``: the server does not start, or stops."""

    USED = "used"
    IGNORED = "ignored"
    HARMFUL = "harmful"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvUseRow:
    """``is_default``: the backend that the engine takes on Hopper or Blackwell where none is named."""

    engine: EngineName
    backend: str
    use: KvUse
    why: str
    is_default: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvScales:
    """Scales as they are stored, or would be. ``method``: the checkpoint's ``quant_method``, empty where it has none.

    ``stored_at``: what stands before the scale's own name, None where it is what the spelling has (``k_proj`` is
    ``v_proj`` for v). ``is_declared``: whether the config has the section that goes with scales of this scope.
    """

    family: str
    model_type: str
    attention: Attention
    spelling: KvSpelling
    scope: KvScope
    method: str = ""
    stored_at: KvPlace | None = None
    is_declared: bool = True

    @property
    def place(self) -> KvPlace:
        """Where its names stand in an attention module."""
        if self.stored_at is not None:
            return self.stored_at
        if self.spelling == "modelopt":
            return "k_proj"
        return "" if self.attention is Attention.GROUPED else "attn_mqa"


class Lost(NamedTuple):
    """Why scales do not arrive."""

    use: KvUse
    why: str


class _Backend(NamedTuple):
    name: str
    use: KvUse
    why: str
    is_default: bool = False


_BOTH = "divides where it writes and multiplies where it reads"
_DROPPED = "the loader knows no such name, and drops it: 1.0"
_OWN_SCALES = "packed rows carry scales of their own, one for every 128 values, and the rope part in BF16"
# a mapper of all quantized checkpoints makes self_attn.attn of ModelOpt's names before the loader of the model, which
# would make self_attn.mla_attn.mla_attn of them, sees any
_NO_NAME = "no name of a scale reaches latent attention: it is dropped with a warning, 1.0"
_CAST = "the cache is written by a plain cast and read multiplied by the scale"
_BACKENDS: Mapping[tuple[EngineName, Attention], tuple[_Backend, ...]] = {
    ("sglang", Attention.GROUPED): (
        _Backend("fa3", KvUse.USED, _BOTH, is_default=True),
        _Backend("trtllm_mha", KvUse.USED, _BOTH, is_default=True),
        _Backend("flashinfer", KvUse.USED, _BOTH),
        _Backend("triton", KvUse.USED, _BOTH),
    ),
    ("sglang", Attention.LATENT): (
        _Backend("fa3", KvUse.IGNORED, "rows of more than 256 values are cast, both ways, without it", is_default=True),
        _Backend("trtllm_mla", KvUse.HARMFUL, _CAST, is_default=True),
        _Backend("cutedsl_mla", KvUse.HARMFUL, _CAST),
        _Backend("flashmla", KvUse.HARMFUL, _CAST),
        _Backend("flashinfer", KvUse.IGNORED, "neither writing nor reading knows it"),
        _Backend("triton", KvUse.USED, _BOTH),
    ),
    ("sglang", Attention.SPARSE): (
        _Backend("flashmla_kv", KvUse.IGNORED, _OWN_SCALES, is_default=True),
        _Backend("flashmla_sparse", KvUse.IGNORED, _OWN_SCALES),
        _Backend("trtllm", KvUse.HARMFUL, _CAST, is_default=True),
    ),
    ("vllm", Attention.GROUPED): (
        _Backend("FLASH_ATTN", KvUse.USED, _BOTH, is_default=True),
        _Backend("FLASHINFER", KvUse.USED, _BOTH, is_default=True),
        _Backend("TRITON_ATTN", KvUse.USED, _BOTH),
    ),
    ("vllm", Attention.LATENT): (
        _Backend("FLASHMLA", KvUse.IGNORED, _NO_NAME, is_default=True),
        _Backend("FLASHINFER_MLA", KvUse.IGNORED, _NO_NAME, is_default=True),
        _Backend("TRITON_MLA", KvUse.IGNORED, _NO_NAME),
        _Backend("CUTLASS_MLA", KvUse.IGNORED, _NO_NAME),
    ),
    ("vllm", Attention.SPARSE): (
        _Backend("FLASHMLA_SPARSE", KvUse.IGNORED, _OWN_SCALES, is_default=True),
        _Backend("FLASHINFER_MLA_SPARSE", KvUse.IGNORED, _NO_NAME, is_default=True),
        _Backend("FLASHINFER_MLA_SPARSE_SM90", KvUse.IGNORED, _NO_NAME),
    ),
}
# the numbers of SGLang's file land in an attribute that only some of a backend reads, as a number and no tensor
_FROM_FILE: Mapping[str, _Backend] = {
    "fa3": _Backend("fa3", KvUse.REFUSED, "AttributeError: a number where the backend takes a tensor", is_default=True),
    "trtllm_mha": _Backend(
        "trtllm_mha", KvUse.REFUSED, "AttributeError: a number where the backend takes a tensor", is_default=True
    ),
    "flashinfer": _Backend(
        "flashinfer", KvUse.HARMFUL, "keys and values are divided by it, and never multiplied again"
    ),
    "triton": _Backend("triton", KvUse.REFUSED, "TypeError: the number that is read stays None"),
}
READS_SCALE_FILE = frozenset(
    {"llama", "qwen2", "qwen3", "mimo", "mimo_v2", "glm4", "opt", "exaone4", "arcee", "solar", "apertus"}
)
"""``model_type`` of the models that SGLang hands ``--quantization-param-path`` to."""
_READ_BY_SGLANG = frozenset({"llama", "exaone4", "arcee", "apertus"})
# whose attention SGLang builds without the quantization config: whatever the name, there is no parameter to load
_WITHOUT_SCALES = frozenset({"glm4_moe", "qwen3_moe", "qwen3"})


# by what stands before the scale's own name
_SGLANG_LATENT: frozenset[KvPlace] = frozenset({"k_proj", "attn_mqa"})
_SGLANG_GROUPED: frozenset[KvPlace] = frozenset({"k_proj", ""})
_VLLM_GROUPED: frozenset[KvPlace] = frozenset({"k_proj", "qkv_proj", "attn", ""})


def kv_use(scales: KvScales) -> tuple[KvUseRow, ...]:
    """A row for each backend of both engines."""
    return (*kv_use_in("sglang", scales), *kv_use_in("vllm", scales))


def kv_use_in(engine: EngineName, scales: KvScales) -> tuple[KvUseRow, ...]:
    """A row for each backend of an engine."""
    lost = why_lost(engine, scales)
    found = []
    for one in _BACKENDS[engine, scales.attention]:
        backend = one
        if lost is None and engine == "sglang" and scales.spelling == "sglang":
            backend = _FROM_FILE[one.name]
        use, why = (backend.use, backend.why) if lost is None else (lost.use, lost.why)
        if lost is None and engine == "vllm" and scales.scope == "head" and one.name != "FLASH_ATTN":
            use, why = KvUse.REFUSED, "the backend has no scales per head: another is taken, or none is found"
        found.append(KvUseRow(engine=engine, backend=one.name, use=use, why=why, is_default=one.is_default))
    return tuple(found)


def is_useful(rows: tuple[KvUseRow, ...]) -> bool:
    """Whether a backend that an engine takes by itself uses the scales."""
    return any(row.use is KvUse.USED and row.is_default for row in rows)


def why_lost(engine: EngineName, scales: KvScales) -> Lost | None:
    """Why scales do not arrive, whatever the backend; None where they do."""
    return _at_sglang(scales) if engine == "sglang" else _at_vllm(scales)


def _at_sglang(scales: KvScales) -> Lost | None:
    is_grouped = scales.attention is Attention.GROUPED
    if scales.spelling == "sglang":
        is_read = scales.model_type in READS_SCALE_FILE and is_grouped
        return None if is_read else Lost(KvUse.REFUSED, "RuntimeError: this model does not take scales from a file")
    why = _why_no_place(scales)
    if why:
        return Lost(KvUse.IGNORED, why)
    if scales.family == "generic" and not (scales.model_type in _READ_BY_SGLANG and is_grouped):
        return Lost(KvUse.UNKNOWN, "which names this model's loader knows is not stated here")
    if scales.family == "glm4_moe_lite":
        return None if scales.place == "attn_mqa" else Lost(KvUse.IGNORED, "the loader garbles these names: 1.0")
    names = _SGLANG_GROUPED if is_grouped else _SGLANG_LATENT
    return None if scales.place in names else Lost(KvUse.IGNORED, _DROPPED)


def _why_no_place(scales: KvScales) -> str:
    """Why SGLang's attention has no parameter for them, whatever their names; empty where it has one."""
    if scales.method == "w4afp8":
        return "w4afp8 gives attention no scales"
    if scales.scope == "head":
        return "a scheme with scales per head is logged and passed over: 1.0"
    if not scales.is_declared and scales.method != "fp8":
        return "the config declares no static FP8 cache with one scale a tensor: 1.0"
    if {scales.family, scales.model_type} & _WITHOUT_SCALES:
        return "this model's attention is built without a place for scales: 1.0"
    return ""


def _at_vllm(scales: KvScales) -> Lost | None:
    if scales.spelling == "sglang":
        return Lost(KvUse.IGNORED, "vLLM has no file of scales")
    if scales.method == "w4afp8":
        return Lost(KvUse.REFUSED, "w4afp8 is a format of SGLang alone")
    if scales.attention is not Attention.GROUPED:
        return Lost(KvUse.IGNORED, _NO_NAME)
    if not scales.method and not scales.is_declared:
        return Lost(KvUse.REFUSED, "ValueError: no parameter has this name, as the config quantizes nothing")
    if scales.scope == "head" and (scales.spelling == "modelopt" or not scales.is_declared):
        return Lost(KvUse.REFUSED, "ValueError: one number is expected")
    return None if scales.place in _VLLM_GROUPED else Lost(KvUse.IGNORED, _DROPPED)
