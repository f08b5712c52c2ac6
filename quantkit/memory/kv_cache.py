"""KV cache bytes of a token on one rank, with the formula written out.

Latent rows stand whole on every tensor-parallel rank; only decode context parallelism (DCP) divides them. Heads are
cut, down to one a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from quantkit.families.kv_shape import HeadKv, LatentKv
from quantkit.memory.engine_rules import EngineRules
from quantkit.memory.kv_format import index_key_bytes
from quantkit.memory.serving import Serving
from quantkit.memory.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCell:
    """``num_bytes`` of a token on one rank; a fraction where DCP deals tokens out. ``formula`` says how it comes."""

    num_bytes: Fraction
    formula: str


def kv_cell(serving: Serving, stage: Stage, rules: EngineRules) -> KvCell:
    """Bytes of a token in the layers of one stage, the MTP layer's among them where it is loaded."""
    shape = serving.kv_shape
    if isinstance(shape, HeadKv):
        return _head_cell(shape, serving, stage)
    return _latent_cell(shape, serving, stage, rules)


def _head_cell(shape: HeadKv, serving: Serving, stage: Stage) -> KvCell:
    dtype, dcp = serving.kv_format.dtype, serving.parallel.dcp
    heads = max(1, shape.num_kv_heads // serving.parallel.attention_tp)
    layer_bytes = heads * 2 * shape.head_dim * dtype.num_bytes
    terms = [(f"{stage.num_own} layers x {heads} KV heads x 2 x {shape.head_dim} x {dtype.num_bytes} B", dcp)]
    if stage.num_mtp:
        terms.append((f"{stage.num_mtp} MTP layer x {layer_bytes:,} B", dcp))
    return _cell(Fraction((stage.num_own + stage.num_mtp) * layer_bytes, dcp), terms)


def _latent_cell(shape: LatentKv, serving: Serving, stage: Stage, rules: EngineRules) -> KvCell:
    dcp = serving.parallel.dcp
    row, key = serving.kv_format.row_bytes(shape), index_key_bytes(shape)
    num_index = sum(layer in shape.index_layers for layer in range(stage.first, stage.last))
    # index keys and the draft's rows
    index_dcp = dcp if rules.deals_out_index else 1
    total = Fraction(stage.num_own * row, dcp) + Fraction(num_index * key, index_dcp)
    terms = [(f"{stage.num_own} layers x {row} B", dcp)]
    if num_index:
        terms.append((f"{num_index} index layers x {key} B", index_dcp))
    if stage.num_mtp:
        draft = row + (key if shape.is_sparse else 0)
        total += Fraction(stage.num_mtp * draft, index_dcp)
        terms.append((f"{stage.num_mtp} MTP layer x {draft} B", index_dcp))
    return _cell(total, terms)


def _cell(num_bytes: Fraction, terms: Sequence[tuple[str, int]]) -> KvCell:
    words = " + ".join(text if ways == 1 else f"{text} / DCP {ways}" for text, ways in terms)
    return KvCell(num_bytes=num_bytes, formula=f"{words} = {float(num_bytes):,.10g} B")
