"""W4A16 in Triton as it is usually written: what the benchmark compares with.

Tokens on the rows of the dot, one byte pointer for each code, a shift by its parity, a scale pointer for each weight,
and float32 arithmetic: some 17 instructions a weight, where an H200 has room for fewer than 4 at the speed of memory.
"""

import torch
import triton
import triton.language as tl

from quantkit_kernels.launch import IS_INTERPRETED


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
    INTERPRET: tl.constexpr,
):
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, num_cols, BLOCK_K):
        col = first + tl.arange(0, BLOCK_K)
        x_mask = (token < num_tokens)[:, None] & (col < num_cols)[None, :]
        x = tl.load(x_ptr + token[:, None] * num_cols + col[None, :], mask=x_mask, other=0.0)
        mask = (row < num_rows)[None, :] & (col < num_cols)[:, None]
        pair = tl.load(bytes_ptr + row[None, :] * (num_cols // 2) + col[:, None] // 2, mask=mask, other=0)
        code = (pair.to(tl.int32) >> (4 * (col[:, None] % 2))) & 15
        scale_at = row[None, :] * (num_cols // GROUP) + col[:, None] // GROUP
        scale = tl.load(scale_ptr + scale_at, mask=mask, other=0.0).to(tl.float32)
        weight = (code - 8).to(tl.float32) * scale
        if INTERPRET:
            sums = tl.dot(x.to(tl.float32), weight, sums)
        else:
            sums = tl.dot(x, weight.to(x.dtype), sums)
    mask = (token < num_tokens)[:, None] & (row < num_rows)[None, :]
    at = token[:, None] * num_rows + row[None, :]
    tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=mask)


def naive_gemm(
    x: torch.Tensor, weight_packed: torch.Tensor, weight_scale: torch.Tensor, *, group_size: int
) -> torch.Tensor:
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
        INTERPRET=IS_INTERPRETED,
        num_warps=4,
    )
    return out
