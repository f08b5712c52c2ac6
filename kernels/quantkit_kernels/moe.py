"""Routed experts with INT4 weights: sort, gate and up with SiLU, down with the router's weight, sum.

Bytes: every expert that is chosen is read once, 0.5 + 2 / group a weight; activations are a few percent of that up to
64 tokens. GLM-5.2 at TP8 in groups of 32: 2.65 MB an expert, so 5 us for one token and 137 us for 64 at 4.3 TB/s. One
to four tokens are not sorted: each pair of token and expert is a block of its own, and the columns of gate and up are
split, so that eight experts give every SM work. Nothing waits for the GPU, and no sum depends on its timing.
"""

from typing import NamedTuple

import torch
import triton

from quantkit_kernels.checks import check_activations, check_devices, check_inference, check_router
from quantkit_kernels.launch import IS_INTERPRETED, check_runs, launches
from quantkit_kernels.moe_align import sort_by_expert
from quantkit_kernels.moe_jit import down_kernel, gate_up_kernel, silu_kernel, sum_kernel
from quantkit_kernels.tiles import MoeShape, MoeTile, moe_tile
from quantkit_kernels.tuned import gpu_of
from quantkit_kernels.word_order import Int4Weight, check_contiguous, check_weight

_COLUMNS = 1024  # of one program that only adds


@launches
def int4_moe(
    x: torch.Tensor,
    gate_up_packed: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down_packed: torch.Tensor,
    down_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    group_size: int,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over each token's experts of weight * down(silu(gate(x)) * up(x)): [T, H] in the dtype of ``x``.

    ``x`` BF16 or FP16 [T, H]; ``gate_up_packed`` int32 [E, 2 I, H / 8], gate first, and ``down_packed`` [E, H, I / 8]
    with BF16 scales, as a checkpoint stores them (stacked) or as ``repack`` returned them; ``topk_weights`` float32 and
    ``topk_ids`` int32 or int64 [T, k]. ``expert_map`` int32 or int64 [global experts]: the local number of each, -1 for
    those of other ranks. Ids that name no expert add nothing. Hidden values are rounded to BF16, and so is each
    expert's output. Raises ValueError for what does not go together, RuntimeError where a gradient is wanted.
    """
    check_inference(x, topk_weights)
    gate_up, down = Int4Weight(gate_up_packed, gate_up_scale), Int4Weight(down_packed, down_scale)
    num_experts, width = _check(x, gate_up, down, group_size=group_size)
    num_tokens, num_cols = x.shape
    check_router(x, topk_weights, topk_ids, expert_map)
    own_map = None if expert_map is None else expert_map.contiguous()
    check_devices(
        x=x,
        gate_up_packed=gate_up_packed,
        gate_up_scale=gate_up_scale,
        down_packed=down_packed,
        down_scale=down_scale,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        expert_map=own_map,
    )
    if x.numel() == 0:
        return torch.empty_like(x)
    check_runs(x)
    tile = moe_tile(
        MoeShape(num_experts, width, num_cols, group_size, topk_ids.shape[1]),
        num_tokens=num_tokens,
        num_global=None if own_map is None else len(own_map),
        is_repacked=gate_up.words.ndim == 4,
        gpu=gpu_of(x.device),
    )
    router = Router(topk_weights.float().contiguous(), topk_ids.contiguous(), own_map)
    tokens = x.to(torch.bfloat16).contiguous()
    return run_moe(tokens, gate_up, down, router, tile=tile, group_size=group_size, dtype=x.dtype)


class Router(NamedTuple):
    """``weights`` float32 and ``ids`` [T, k], ``expert_map`` as ``int4_moe`` takes it; all contiguous."""

    weights: torch.Tensor
    ids: torch.Tensor
    expert_map: torch.Tensor | None = None


def run_moe(
    x: torch.Tensor,
    gate_up: Int4Weight,
    down: Int4Weight,
    router: Router,
    *,
    tile: MoeTile,
    group_size: int,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """[T, H] in ``dtype`` with a tile of the caller's choice; everything is contiguous and checked, ``x`` BF16."""
    weights, ids, expert_map = router
    (num_tokens, num_cols), top_k = x.shape, ids.shape[-1]
    num_pairs, num_experts = num_tokens * top_k, gate_up.words.shape[0]
    width = gate_up.words.shape[-2] // 2
    no_map = expert_map if expert_map is not None else ids
    num_global = 0 if expert_map is None else len(expert_map)
    if tile.is_sorted:
        pairs, experts, num_blocks = sort_by_expert(
            ids, num_experts=num_experts, block_m=tile.block_m, expert_map=expert_map
        )
        most_blocks = len(experts)
    else:
        pairs, experts, num_blocks, most_blocks = ids, ids, ids, num_pairs
    common = {
        "NUM_EXPERTS": num_experts,
        "GROUP": group_size,
        "BLOCK_M": tile.block_m,
        "WARPS": tile.num_warps,
        "IS_SORTED": tile.is_sorted,
        "HAS_MAP": expert_map is not None,
        "IS_REPACKED": gate_up.words.ndim == 4,
        "INTERPRET": IS_INTERPRETED,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    blocks = (pairs, experts, no_map, num_blocks, num_pairs, num_global)
    hidden = x.new_empty((num_pairs, width))
    parts = hidden
    if tile.split_k > 1:
        parts = x.new_empty((tile.split_k, num_pairs, 2 * width), dtype=torch.float32)
    rows = triton.cdiv(width, tile.gate_up_n)
    gate_up_kernel[(rows * most_blocks, 1, tile.split_k)](
        x,
        *gate_up,
        parts,
        *blocks,
        I=width,
        K=num_cols,
        TOP_K=top_k,
        BLOCK_N=tile.gate_up_n,
        SPLIT_K=tile.split_k,
        **common,
    )
    if tile.split_k > 1:
        silu_kernel[(num_pairs, triton.cdiv(width, _COLUMNS))](
            parts, hidden, num_pairs, I=width, SPLIT_K=tile.split_k, BLOCK=_COLUMNS, INTERPRET=IS_INTERPRETED
        )
    outputs = x.new_empty((num_pairs, num_cols))
    out = x.new_empty((num_tokens, num_cols), dtype=dtype)
    down_kernel[(triton.cdiv(num_cols, tile.down_n) * most_blocks,)](
        hidden, *down, weights, outputs, *blocks, N=num_cols, K=width, BLOCK_N=tile.down_n, **common
    )
    sum_kernel[(num_tokens, triton.cdiv(num_cols, _COLUMNS))](
        outputs,
        ids,
        no_map,
        out,
        num_global,
        N=num_cols,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        BLOCK=_COLUMNS,
        HAS_MAP=expert_map is not None,
        INTERPRET=IS_INTERPRETED,
    )
    return out


def _check(x: torch.Tensor, gate_up: Int4Weight, down: Int4Weight, *, group_size: int) -> tuple[int, int]:
    """Number of experts, and their width."""
    check_activations(x, num_dims=2)
    if gate_up.words.ndim != down.words.ndim or gate_up.words.ndim not in (3, 4):
        raise ValueError("gate and up, and down, are both as stored [E, R, C / 8] or both repacked [E, K, R, 16]")
    num_cols, experts = x.shape[1], (len(gate_up.words),)
    num_rows = check_weight(gate_up, num_cols=num_cols, group_size=group_size, experts=experts, name="gate_up")
    if num_rows % 2:
        raise ValueError(f"gate_up has {num_rows} rows, as many of the gate as of up")
    width = num_rows // 2
    check_weight(down, num_cols=width, group_size=group_size, num_rows=num_cols, experts=experts, name="down")
    for name, weight in (("gate_up", gate_up), ("down", down)):
        check_contiguous(weight, name=name)
    return experts[0], width
