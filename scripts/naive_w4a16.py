"""W4A16 in Triton as it is usually written: what the benchmark compares with.

Tokens on the rows of the dot, one byte pointer for each code, a shift by its parity, a scale pointer for each weight,
and float32 arithmetic: compiled for sm_90 some 18 to 24 instructions a weight, where an H200 has room for fewer than 4
at the speed of memory. Blocks of experts are the generic default where nothing was tuned.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.gemm_jit import narrow
from quantkit_kernels.launch import IS_INTERPRETED
from quantkit_kernels.moe_align import Routing, sort_by_expert
from quantkit_kernels.moe_jit import silu_kernel, sum_kernel

_COLUMNS = 1024  # of one program that only adds


@triton.jit
def _naive_weights(  # type: ignore[no-untyped-def]
    bytes_ptr, scale_ptr, row, col, num_cols, GROUP: tl.constexpr, IS_EVEN: tl.constexpr
):
    """Weights [columns, rows] in float32; zeros beyond the columns, of which ``IS_EVEN`` leaves none over."""
    byte_at = bytes_ptr + row[None, :] * (num_cols // 2) + col[:, None] // 2
    scale_at = scale_ptr + row[None, :] * (num_cols // GROUP) + col[:, None] // GROUP
    if IS_EVEN:
        pair = tl.load(byte_at)
        scale = tl.load(scale_at)
    else:
        pair = tl.load(byte_at, mask=(col < num_cols)[:, None], other=0)
        scale = tl.load(scale_at, mask=(col < num_cols)[:, None], other=0.0)
    code = (pair.to(tl.int32) >> (4 * (col[:, None] % 2))) & 15
    return (code - 8).to(tl.float32) * scale.to(tl.float32)


@triton.jit
def _naive_dot(x, weight, sums, INTERPRET: tl.constexpr):  # type: ignore[no-untyped-def]
    if INTERPRET:
        return tl.dot(x.to(tl.float32), weight, sums)
    return tl.dot(x, weight.to(x.dtype), sums)


@triton.jit
def _naive_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    bytes_ptr,
    scale_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    num_cols,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, num_cols, BLOCK_K):
        col = first + tl.arange(0, BLOCK_K)
        x_mask = (token < num_tokens)[:, None] & (col < num_cols)[None, :]
        x = tl.load(x_ptr + token[:, None] * num_cols + col[None, :], mask=x_mask, other=0.0)
        weight = _naive_weights(bytes_ptr, scale_ptr, row % num_rows, col, num_cols, GROUP, IS_EVEN)
        sums = _naive_dot(x, weight, sums, INTERPRET)
    mask = (token < num_tokens)[:, None] & (row < num_rows)[None, :]
    at = token[:, None] * num_rows + row[None, :]
    tl.store(out_ptr + at, narrow(sums, out_ptr, INTERPRET), mask=mask)


def naive_gemm(x: Tensor, weight_packed: Tensor, weight_scale: Tensor, *, group_size: int) -> Tensor:
    """``int4_gemm`` of a checkpoint's own words."""
    (num_tokens, num_cols), num_rows = x.shape, len(weight_packed)
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(num_rows, 64), triton.cdiv(num_tokens, 16))
    _naive_kernel[grid](
        x,
        weight_packed.view(torch.uint8),
        weight_scale,
        out,
        num_tokens,
        num_rows,
        num_cols,
        GROUP=group_size,
        BLOCK_M=16,
        BLOCK_N=64,
        BLOCK_K=64,
        IS_EVEN=num_cols % 64 == 0,
        INTERPRET=IS_INTERPRETED,
        num_warps=4,
    )
    return out


@triton.jit
def _naive_moe_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    bytes_ptr,
    scale_ptr,
    weights_ptr,
    out_ptr,
    pairs_ptr,
    experts_ptr,
    num_blocks_ptr,
    num_pairs,
    num_rows,
    num_cols,
    PER_TOKEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """out [pairs, rows]; ``PER_TOKEN`` pairs share a row of ``x``; ``IS_WEIGHTED``: times the router's weight."""
    num_row_blocks = tl.cdiv(num_rows, BLOCK_N)
    block = tl.program_id(0) // num_row_blocks
    if block >= tl.load(num_blocks_ptr):
        return
    pair = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_pair = pair < num_pairs
    expert = tl.load(experts_ptr + block).to(tl.int64)
    row = (tl.program_id(0) % num_row_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    bytes_ptr += expert * num_rows * (num_cols // 2)
    scale_ptr += expert * num_rows * (num_cols // GROUP)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, num_cols, BLOCK_K):
        col = first + tl.arange(0, BLOCK_K)
        x_mask = is_pair[:, None] & (col < num_cols)[None, :]
        x = tl.load(x_ptr + (pair // PER_TOKEN)[:, None] * num_cols + col[None, :], mask=x_mask, other=0.0)
        weight = _naive_weights(bytes_ptr, scale_ptr, row % num_rows, col, num_cols, GROUP, IS_EVEN)
        sums = _naive_dot(x, weight, sums, INTERPRET)
    if IS_WEIGHTED:
        sums *= tl.load(weights_ptr + pair, mask=is_pair, other=0.0)[:, None]
    mask = is_pair[:, None] & (row < num_rows)[None, :]
    tl.store(out_ptr + pair[:, None] * num_rows + row[None, :], narrow(sums, out_ptr, INTERPRET), mask=mask)


def _naive_product(
    x: Tensor, weight: tuple[Tensor, Tensor], topk_weights: Tensor | None, routing: Routing, out: Tensor, block_m: int
) -> None:
    """``out`` [pairs, R] of the experts' rows; the second product of the two knows the router's weights."""
    num_rows, num_cols = weight[0].shape[1], x.shape[1]
    block_n, block_k = (32, 64) if block_m == 16 else (64, 32)
    _naive_moe_kernel[(triton.cdiv(num_rows, block_n) * len(routing.experts),)](
        x,
        weight[0].view(torch.uint8),
        weight[1],
        x if topk_weights is None else topk_weights,
        out,
        *routing,
        len(out),
        num_rows,
        num_cols,
        PER_TOKEN=len(out) // len(x),
        GROUP=num_cols // weight[1].shape[2],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        IS_EVEN=num_cols % block_k == 0,
        IS_WEIGHTED=topk_weights is not None,
        INTERPRET=IS_INTERPRETED,
        num_warps=4,
    )


def naive_moe(
    x: Tensor,
    gate_up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    topk_weights: Tensor,
    topk_ids: Tensor,
) -> Tensor:
    """``int4_moe`` of a checkpoint's own words. What stands around the two products is that of ``int4_moe``."""
    (num_tokens, num_cols), top_k = x.shape, topk_ids.shape[-1]
    num_experts, double_width = gate_up[0].shape[:2]
    num_pairs, width = num_tokens * top_k, double_width // 2
    block_m = 16 if num_tokens <= num_experts else 64
    routing = sort_by_expert(topk_ids, num_experts=num_experts, block_m=block_m)
    both = x.new_empty((num_pairs, double_width), dtype=torch.float32)
    _naive_product(x, gate_up, None, routing, both, block_m)
    hidden = x.new_empty((num_pairs, width))
    silu_kernel[(num_pairs, triton.cdiv(width, _COLUMNS))](
        both, hidden, num_pairs, I=width, SPLIT_K=1, BLOCK=_COLUMNS, INTERPRET=IS_INTERPRETED
    )
    outputs = x.new_empty((num_pairs, num_cols))
    _naive_product(hidden, down, topk_weights, routing, outputs, block_m)
    out = torch.empty_like(x)
    sum_kernel[(num_tokens, triton.cdiv(num_cols, _COLUMNS))](
        outputs,
        topk_ids,
        topk_ids,
        out,
        0,
        N=num_cols,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        BLOCK=_COLUMNS,
        HAS_MAP=False,
        INTERPRET=IS_INTERPRETED,
    )
    return out
