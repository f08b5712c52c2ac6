"""Under which entry a file speaks of a module: the statistics' own names, and those of llama.cpp.

Only what has the very same input has a line here. llama.cpp's ``attn_k_b`` and ``attn_v_b`` are the halves of
``kv_b_proj``, but what they multiply is the query and the attention's output: no statistics of ``kv_b_proj``.
"""

from typing import NamedTuple

from quantkit.importance.file import Kind
from quantkit.module_names import expert_of, layer_of
from quantkit.statistics.names import DOWN, GATE_UP

_STACKED = {"gate_proj": GATE_UP, "up_proj": GATE_UP, "down_proj": DOWN}
_EXPERTS = {
    # gate and up have one input, and each speaks for the other where that is missing
    "gate_proj": ("ffn_gate_exps", "ffn_gate_up_exps", "ffn_up_exps"),
    "up_proj": ("ffn_up_exps", "ffn_gate_up_exps", "ffn_gate_exps"),
    "down_proj": ("ffn_down_exps",),
}
LLAMA_CPP = {  # module below its layer, to the middle of blk.N.NAME.weight
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.weights_proj": "indexer.proj",
}


class Place(NamedTuple):
    """``entry`` of a file, and which row of it, for an expert."""

    entry: str
    expert: int | None = None


def places_of(module: str, *, kind: Kind, root: str) -> tuple[Place, ...]:
    """Where statistics of a module may stand, the best first. ``root``: what is before ``layers.`` in the text model.

    A block of llama.cpp is a layer of the same number; MTP layers come behind the decoder's in both.
    """
    expert = expert_of(module)
    if expert is not None and (expert.number is None or expert.rest not in _STACKED):
        expert = None
    if kind == "statistics":
        if expert is None:
            return (Place(module),)
        return (Place(f"{expert.experts}.{_STACKED[expert.rest]}", expert.number),)
    layer = layer_of(module)
    if layer is None or layer.root != root:
        return (Place("output"),) if module == "lm_head" else ()
    block = f"blk.{layer.number}"
    if expert is not None:
        return tuple(Place(f"{block}.{name}", expert.number) for name in _EXPERTS[expert.rest])
    name = LLAMA_CPP.get(layer.rest)
    return () if name is None else (Place(f"{block}.{name}"),)
