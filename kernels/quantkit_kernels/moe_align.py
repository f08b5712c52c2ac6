"""Which expert's rows each program takes: pairs of token and expert, sorted by expert, in blocks of one expert each."""

from typing import NamedTuple

import torch
import triton

from quantkit_kernels.moe_align_jit import align_kernel

_CHUNK = 1024


class Routing(NamedTuple):
    """``pairs`` int32 [blocks * block_m]: the token's number times top-k plus the choice's, or their count as padding.

    ``experts`` int32 [blocks]: whose rows a block wants; ``num_blocks`` int32 [1]: those that are in use.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    num_blocks: torch.Tensor


def sort_by_expert(
    topk_ids: torch.Tensor, *, num_experts: int, block_m: int, expert_map: torch.Tensor | None = None
) -> Routing:
    """One launch, and no wait for the GPU: buffers hold the worst case. Pairs of an expert stay in their order.

    ``topk_ids`` int32 or int64 [T, k]; ``expert_map`` int32 [global experts]: the local number, or -1. Pairs whose
    expert is not one of ``num_experts`` are left out.
    """
    num_pairs = topk_ids.numel()
    most_blocks = min(num_pairs, num_experts) + num_pairs // block_m
    device = topk_ids.device
    pairs = torch.full((most_blocks * block_m,), num_pairs, dtype=torch.int32, device=device)
    experts = torch.empty((most_blocks,), dtype=torch.int32, device=device)
    num_blocks = torch.empty((1,), dtype=torch.int32, device=device)
    if num_pairs:
        align_kernel[(num_experts,)](
            topk_ids,
            topk_ids if expert_map is None else expert_map,
            pairs,
            experts,
            num_blocks,
            num_pairs,
            0 if expert_map is None else len(expert_map),
            NUM_EXPERTS=num_experts,
            NUM_BINS=triton.next_power_of_2(num_experts + 1),
            BLOCK_M=block_m,
            CHUNK=_CHUNK,
            HAS_MAP=expert_map is not None,
            num_warps=4,
        )
    return Routing(pairs, experts, num_blocks)
