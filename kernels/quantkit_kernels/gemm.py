"""Activations times INT4 weights, for one token to thousands.

Bytes: 0.5 + 2 / group a weight, read once. Up to ``MAX_KERNEL_TOKENS`` the kernel decodes weights in registers, at
about 3.0 instructions a weight (compiled for sm_90; an H200 may issue 3.6 to 3.9 at the speed of its memory), and the
splits of the columns give every SM work. One token takes the same way: its multiplications are free on the
tensor core, and would cost the cores 2 instructions a weight. Beyond, the weight is decoded once, 2 bytes a weight
written and read, and the library's BF16 product does the rest, which is bound by arithmetic there.
"""

import torch
import triton

from quantkit_kernels.checks import check_activations, check_devices, check_inference
from quantkit_kernels.gemm_jit import dequantize_kernel, gemm_kernel, sum_splits_kernel
from quantkit_kernels.launch import IS_INTERPRETED, check_runs, launches
from quantkit_kernels.tiles import DenseShape, GemmTile, gemm_tile
from quantkit_kernels.tuned import gpu_of
from quantkit_kernels.word_order import TILE_COLS, Int4Weight, check_contiguous, check_weight

MAX_KERNEL_TOKENS = 128
_DEQUANTIZE_ROWS = 64
_SUM_ITEMS = 1024


@launches
def int4_gemm(
    x: torch.Tensor, weight_packed: torch.Tensor, weight_scale: torch.Tensor, *, group_size: int
) -> torch.Tensor:
    """``x`` [..., C] times the transposed weight [R, C]: [..., R] in the dtype of ``x``.

    ``x`` is BF16, or FP16, which is rounded to BF16 first; of FP16, outputs from 65,408 on may be infinite. The weight
    is either a checkpoint's ``weight_packed`` int32 [R, C / 8] and ``weight_scale`` BF16 [R, C / group], or what
    ``repack`` returned, which is faster. Code times scale is rounded to BF16, sums are float32. The same bytes in every
    run. Raises ValueError for what does not go together, RuntimeError where a gradient is wanted. Three dimensions are
    a repacked weight of C / 128 tiles: stored experts [C / 128, R, 16] look the same, so give them one by one, or to
    ``int4_moe``.
    """
    check_inference(x)
    check_activations(x)
    num_cols = x.shape[-1]
    weight = Int4Weight(weight_packed, weight_scale)
    num_rows = check_weight(weight, num_cols=num_cols, group_size=group_size)
    check_contiguous(weight)
    check_devices(x=x, weight_packed=weight_packed, weight_scale=weight_scale)
    tokens = x.reshape(-1, num_cols).to(torch.bfloat16).contiguous()
    if len(tokens) == 0 or num_rows == 0:
        return x.new_empty((*x.shape[:-1], num_rows))
    check_runs(x)
    if len(tokens) > MAX_KERNEL_TOKENS:
        out = (tokens @ dequantize(weight, num_cols=num_cols, group_size=group_size).mT).to(x.dtype)
    else:
        shape = DenseShape(num_rows, num_cols, group_size)
        is_repacked = weight.words.ndim == 3
        tile = gemm_tile(shape, num_tokens=len(tokens), is_repacked=is_repacked, gpu=gpu_of(x.device))
        out = run_gemm(tokens, weight, group_size=group_size, tile=tile, dtype=x.dtype)
    return out.reshape(*x.shape[:-1], num_rows)


def run_gemm(
    tokens: torch.Tensor, weight: Int4Weight, *, group_size: int, tile: GemmTile, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """[T, R] in ``dtype`` of BF16 tokens by the kernel, with a tile of the caller's choice."""
    num_tokens, num_cols = tokens.shape
    num_rows = weight.words.shape[-2]
    out = tokens.new_empty((num_tokens, num_rows), dtype=dtype)
    has_parts = tile.split_k > 1
    parts = tokens.new_empty((tile.split_k, num_tokens, num_rows), dtype=torch.float32) if has_parts else out
    grid = (triton.cdiv(num_rows, tile.block_n), triton.cdiv(num_tokens, tile.block_m), tile.split_k)
    gemm_kernel[grid](
        tokens,
        *weight,
        parts,
        num_tokens,
        N=num_rows,
        K=num_cols,
        GROUP=group_size,
        BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m,
        SPLIT_K=tile.split_k,
        WARPS=tile.num_warps,
        IS_REPACKED=weight.words.ndim == 3,
        INTERPRET=IS_INTERPRETED,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if has_parts:
        sum_splits_kernel[(triton.cdiv(out.numel(), _SUM_ITEMS),)](
            parts, out, out.numel(), SPLIT_K=tile.split_k, BLOCK=_SUM_ITEMS, INTERPRET=IS_INTERPRETED
        )
    return out


def dequantize(weight: Int4Weight, *, num_cols: int, group_size: int) -> torch.Tensor:
    """The weight in BF16 [R, C]; code times scale rounds once."""
    num_rows = weight.words.shape[-2]
    out = torch.empty((num_rows, num_cols), dtype=torch.bfloat16, device=weight.words.device)
    grid = (triton.cdiv(num_rows, _DEQUANTIZE_ROWS), triton.cdiv(num_cols, TILE_COLS))
    dequantize_kernel[grid](
        *weight,
        out,
        N=num_rows,
        K=num_cols,
        GROUP=group_size,
        BLOCK_N=_DEQUANTIZE_ROWS,
        WARPS=4,
        IS_REPACKED=weight.words.ndim == 3,
        INTERPRET=IS_INTERPRETED,
        num_warps=4,
    )
    return out
