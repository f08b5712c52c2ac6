"""The products as operators of torch: seen as one by torch.compile, and recorded by CUDA graphs.

A tensor on a GPU goes to the kernels (in Triton's interpreter every one), on a CPU to the plain twin; what does not go
together is the same ValueError on each.
"""

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.checks import check_activations, check_router
from quantkit_kernels.gemm import int4_gemm
from quantkit_kernels.launch import IS_INTERPRETED
from quantkit_kernels.moe import int4_moe
from quantkit_kernels.word_order import Int4Weight, check_weight, unrepack


@torch.library.custom_op("quantkit::int4_linear", mutates_args=())
def int4_linear(x: Tensor, words: Tensor, scale: Tensor, group_size: int) -> Tensor:
    """``int4_gemm`` of repacked weights."""
    check_tokens(x, words, scale)
    check_weight(Int4Weight(words, scale), num_cols=x.shape[-1], group_size=group_size)
    if x.is_cuda or IS_INTERPRETED:
        return int4_gemm(x, words, scale, group_size=group_size)
    weight = unrepack(Int4Weight(words, scale), num_cols=x.shape[-1], group_size=group_size)
    return reference.int4_gemm(x, *weight, group_size=group_size)


@int4_linear.register_fake
def _(x: Tensor, words: Tensor, scale: Tensor, group_size: int) -> Tensor:
    check_tokens(x, words, scale)
    return x.new_empty((*x.shape[:-1], words.shape[-2]))


@torch.library.custom_op("quantkit::int4_experts", mutates_args=())
def int4_experts(
    x: Tensor,
    gate_up_words: Tensor,
    gate_up_scale: Tensor,
    down_words: Tensor,
    down_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    group_size: int,
    expert_map: Tensor | None = None,
) -> Tensor:
    """``int4_moe`` of repacked weights."""
    gate_up, down = Int4Weight(gate_up_words, gate_up_scale), Int4Weight(down_words, down_scale)
    router = [one for one in (topk_weights, topk_ids, expert_map) if one is not None]
    check_tokens(x, *gate_up, *down, *router, num_dims=2)
    check_router(x, topk_weights, topk_ids, expert_map)
    experts, width = (len(gate_up_words),), gate_up_words.shape[-2] // 2
    check_weight(gate_up, num_cols=x.shape[1], group_size=group_size, experts=experts, name="gate_up")
    check_weight(down, num_cols=width, group_size=group_size, num_rows=x.shape[1], experts=experts, name="down")
    if x.is_cuda or IS_INTERPRETED:
        return int4_moe(x, *gate_up, *down, topk_weights, topk_ids, group_size=group_size, expert_map=expert_map)
    stored = (
        *unrepack(gate_up, num_cols=x.shape[-1], group_size=group_size),
        *unrepack(down, num_cols=width, group_size=group_size),
    )
    return reference.int4_moe(x, *stored, topk_weights, topk_ids, group_size=group_size, expert_map=expert_map)


@int4_experts.register_fake
def _(x: Tensor, *others: Tensor | int | None) -> Tensor:
    check_tokens(x, *(one for one in others if isinstance(one, Tensor)), num_dims=2)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def check_tokens(x: Tensor, *others: Tensor, num_dims: int | None = None) -> None:
    """Raise ValueError for activations that are not the kernels', and for tensors that are elsewhere."""
    check_activations(x, num_dims=num_dims)
    for one in others:
        if one.device != x.device:
            raise ValueError(f"activations are on {x.device}, a weight or the router's choice on {one.device}")
