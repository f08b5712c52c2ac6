"""The products as operators of torch: seen as one by torch.compile, and recorded by CUDA graphs.

A tensor on a GPU goes to the kernels (in Triton's interpreter every one), on a CPU to the plain twin; what does not go
together is the same ValueError on each.
"""

import torch
from torch import Tensor

from quantkit_kernels import reference
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
    check_tokens(x, *gate_up, *down, topk_weights, num_dims=2)
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
    """Raise ValueError for activations of another dtype or shape than the kernels', and for tensors elsewhere."""
    if x.dtype not in (torch.bfloat16, torch.float16) or not x.ndim or num_dims not in (None, x.ndim):
        wanted = "[..., columns]" if num_dims is None else "[tokens, columns]"
        raise ValueError(f"activations are BF16 or FP16 {wanted}, not {x.dtype} {tuple(x.shape)}")
    for one in others:
        if one.device != x.device:
            raise ValueError(f"activations are on {x.device}, a weight or the router's choice on {one.device}")


def check_router(x: Tensor, weights: Tensor, ids: Tensor, expert_map: Tensor | None) -> None:
    """Raise ValueError for what does not choose experts for each token."""
    if ids.shape != weights.shape or ids.ndim != 2 or len(ids) != len(x):
        raise ValueError(f"{len(x)} tokens, weights {tuple(weights.shape)}, ids {tuple(ids.shape)}")
    for name, one in (("topk_ids", ids), ("expert_map", expert_map)):
        if one is not None and (one.dtype not in (torch.int32, torch.int64) or one.device != x.device):
            raise ValueError(f"{name} is int32 or int64 on {x.device}, not {one.dtype} on {one.device}")
