"""KV cache bytes of a token on one rank, with the formula written out.

Latent rows stand whole on every tensor-parallel rank; only decode context parallelism (DCP) divides them. Heads are
cut, down to one a rank. Facts: SGLang 0.5.23 and vLLM 0.33.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from quantkit.engines.parallel import EngineName, Parallel
from quantkit.errors import UsageError
from quantkit.families.kv_shape import HeadKv, KvShape, LatentKv
from quantkit.memory.weights import Stage

_LATENT_SCALE_GROUP, _FP32_BYTES, _BF16_BYTES = 128, 4, 2


class KvDtype(StrEnum):
    """What keys and values are stored in."""

    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def num_bytes(self) -> int:
        return 2 if self is KvDtype.BF16 else 1


class KvLayout(StrEnum):
    """``raw``: values one behind another. ``packed``: sparse attention's FP8 row, with scales and a BF16 rope part."""

    RAW = "raw"
    PACKED = "packed"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """``chosen_by``: whose choice it is, in words."""

    dtype: KvDtype
    layout: KvLayout
    chosen_by: str

    def row_bytes(self, shape: LatentKv) -> int:
        """One latent row: 1152 in BF16, 576 raw FP8, 656 packed (512 codes, 4 FP32 scales, 64 BF16 rope values)."""
        if self.layout is KvLayout.PACKED:
            scales = shape.latent_dim // _LATENT_SCALE_GROUP * _FP32_BYTES
            return shape.latent_dim + scales + shape.rope_dim * _BF16_BYTES
        return (shape.latent_dim + shape.rope_dim) * self.dtype.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCell:
    """``num_bytes`` of a token on one rank; a fraction where DCP deals tokens out. ``formula`` says how it comes."""

    num_bytes: Fraction
    formula: str


def check_format(shape: KvShape, kv_format: KvFormat) -> None:
    """Raise UsageError for a layout that the model's attention does not have."""
    if kv_format.layout is KvLayout.PACKED:
        if not (isinstance(shape, LatentKv) and shape.is_sparse):
            raise UsageError(
                "--kv-layout packed: 656-byte rows exist for sparse attention (DSA: GLM-5.x, DeepSeek-V3.2) only",
                remedy="leave --kv-layout out",
            )
        if kv_format.dtype is not KvDtype.FP8:
            raise UsageError("--kv-layout packed is an FP8 layout", remedy="add --kv-dtype fp8")


def kv_cell(
    shape: KvShape, kv_format: KvFormat, stage: Stage, parallel: Parallel, engine: EngineName, *, with_mtp: bool
) -> KvCell:
    """Bytes of a token in the layers of one stage, the MTP layer's among them in the last."""
    num_layers = stage.last - stage.first
    num_mtp = shape.num_mtp_layers if with_mtp and stage.is_last else 0
    if isinstance(shape, HeadKv):
        return _head_cell(shape, kv_format, parallel, num_layers, num_mtp)
    return _latent_cell(shape, kv_format, stage, parallel, engine, num_mtp)


def _head_cell(shape: HeadKv, kv_format: KvFormat, parallel: Parallel, num_layers: int, num_mtp: int) -> KvCell:
    heads = max(1, shape.num_kv_heads // parallel.attention_tp)
    layer_bytes = heads * 2 * shape.head_dim * kv_format.dtype.num_bytes
    words = f"{num_layers} layers x {heads} KV heads x 2 x {shape.head_dim} x {kv_format.dtype.num_bytes} B"
    terms = [(words, parallel.dcp)]
    if num_mtp:
        terms.append((f"{num_mtp} MTP layer x {layer_bytes:,} B", parallel.dcp))
    return _cell(Fraction((num_layers + num_mtp) * layer_bytes, parallel.dcp), terms)


def _latent_cell(
    shape: LatentKv, kv_format: KvFormat, stage: Stage, parallel: Parallel, engine: EngineName, num_mtp: int
) -> KvCell:
    row, key = kv_format.row_bytes(shape), _index_key_bytes(shape)
    num_layers = stage.last - stage.first
    num_index = sum(stage.first <= layer < stage.last for layer in shape.index_layers)
    # SGLang keeps index keys and the draft's rows whole on every DCP rank, vLLM deals them out like the rest
    index_dcp = 1 if engine == "sglang" else parallel.dcp
    total = Fraction(num_layers * row, parallel.dcp) + Fraction(num_index * key, index_dcp)
    terms = [(f"{num_layers} layers x {row} B", parallel.dcp)]
    if num_index:
        terms.append((f"{num_index} index layers x {key} B", index_dcp))
    if num_mtp:
        draft = row + (key if shape.is_sparse else 0)
        total += Fraction(num_mtp * draft, index_dcp)
        terms.append((f"{num_mtp} MTP layer x {draft} B", index_dcp))
    return _cell(total, terms)


def _index_key_bytes(shape: LatentKv) -> int:
    """FP8 codes and one FP32 scale for every 128 of them, whatever the KV dtype."""
    return shape.index_dim + -(-shape.index_dim // _LATENT_SCALE_GROUP) * _FP32_BYTES


def _cell(num_bytes: Fraction, terms: Sequence[tuple[str, int]]) -> KvCell:
    words = " + ".join(text if ways == 1 else f"{text} / DCP {ways}" for text, ways in terms)
    return KvCell(num_bytes=num_bytes, formula=f"{words} = {float(num_bytes):,.10g} B")
