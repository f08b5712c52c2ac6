"""MLA decode over a paged KV cache, BF16 or FP8: one query token of each sequence, and the lse that splits merge by.

Keys are whole rows, values their latent part. Tokens are the rows of both dots (``K @ q^T`` and ``V^T @ p``) and heads
the columns, so that FP8 keys meet wgmma as they lie in the cache. There the query is the sum of two E4M3, as exact as
BF16, times a power of two a head; values become FP16, which holds every E4M3, and so do probabilities. BF16 rows stay
BF16.

Per token and sequence, for all heads that one program holds (latent 512, rope 64; at 4.3 TB/s):

    layout    bytes    time       FLOPs a head
    bf16       1152    0.268 ns   2 * (576 + 512) = 2176
    flat576     576    0.134 ns   2 * (2 * 576 + 512) = 3328: the query has two terms
    dsa656      656    0.153 ns   2 * (2 * 512 + 64 + 512) = 3200

At the floor of flat576 eight heads are 199 TFLOP/s (a third in FP16): bytes decide. Heads beyond those of a program
read the rows again, from L2. A split writes 4 * 512 bytes a head, and the merge reads them.

Shapes: ``B`` sequences, ``H`` heads. A query's columns are exact in FP8 down to 2**-10 of the largest of
its head, and off by 2**-18 of that below.
"""

import torch
import triton

from quantkit_kernels.checks import check_devices, check_inference, seen
from quantkit_kernels.kv_layout import SCALE_COLS, Layout, RowParts, check_row_scale, row_parts
from quantkit_kernels.launch import IS_INTERPRETED, check_runs, launches
from quantkit_kernels.mla_jit import mla_decode_kernel
from quantkit_kernels.split_kv import (
    LOG2_E,
    Parts,
    check_alignment,
    check_sequences,
    is_power_of_two,
    num_slots,
    plan_splits,
)
from quantkit_kernels.tiles import mla_tile

NUM_TILES = 4  # of the latent part


@launches
def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    layout: Layout,
    scale: float = 1.0,
    rope_dim: int = 64,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` BF16 [B, H, latent] and ``lse`` float32 [B, H] of ``softmax(q k^T * softmax_scale) v``.

    ``q`` BF16 [B, H, latent + rope]; ``cache`` uint8 [pages, page_size, row_bytes]; ``page_table`` int32 [B,
    max_pages]; ``seq_lens`` int32 [B], zero for ``out`` 0 and ``lse`` -inf; lengths beyond the table are cut to it.
    Rows: ``bf16``; ``flat576``, E4M3 times ``scale``; ``dsa656``, whose latents have 512 columns: kv_layout.py. Nothing
    behind a sequence's end is read, page numbers included; page numbers before it are believed. ``num_splits``: by the
    shapes if None. Raises ValueError for what does not go together, RuntimeError where a gradient is wanted.
    """
    check_inference(q)
    check_sequences(q, page_table, seq_lens, num_splits)
    num_seqs, num_heads, width = q.shape
    latent_dim = width - rope_dim
    row = _check_cache(cache, layout, latent_dim, rope_dim)
    check_row_scale(layout, scale)
    check_alignment(q=q, cache=cache)
    check_devices(q=q, cache=cache, page_table=page_table, seq_lens=seq_lens)
    page_size, row_bytes = cache.shape[1:]
    tile = mla_tile(layout, num_heads)
    head_tiles = triton.cdiv(num_heads, tile.block_heads)
    if num_splits is None:
        num_blocks = triton.cdiv(page_table.shape[1] * page_size, tile.block_tokens)
        num_splits = plan_splits(num_seqs * head_tiles, num_blocks, num_slots(q.device, tile))
    parts = Parts((num_seqs, num_heads, latent_dim), num_splits, q.device)
    latent = cache.view(torch.bfloat16 if layout == "bf16" else torch.float8_e4m3fn)
    rope = latent if layout == "flat576" else cache.view(torch.bfloat16)
    has_scales = row.rope > row.scales
    if parts.out.numel():
        check_runs(q)
        mla_decode_kernel[(head_tiles, num_splits, num_seqs)](
            q,
            latent,
            rope,
            cache.view(torch.float32) if has_scales else q,
            page_table,
            seq_lens,
            parts.part_out,
            parts.part_lse,
            softmax_scale * scale * LOG2_E,
            scale,
            num_heads,
            page_table.shape[1],
            num_splits,
            TILE=latent_dim // NUM_TILES,
            ROPE=rope_dim,
            LATENT_ROW=row_bytes // latent.itemsize,
            ROPE_ROW=row_bytes // rope.itemsize,
            ROPE_START=row.rope // rope.itemsize,
            SCALE_ROW=row_bytes // 4 if has_scales else 0,
            SCALE_START=row.scales // 4,
            PAGE_SIZE=page_size,
            BLOCK_H=tile.block_heads,
            BLOCK_T=tile.block_tokens,
            IS_WHOLE=num_splits == 1,
            INTERPRET=IS_INTERPRETED,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return parts.merge()


def _check_cache(cache: torch.Tensor, layout: Layout, latent_dim: int, rope_dim: int) -> RowParts:
    if not is_power_of_two(latent_dim, least=32 * NUM_TILES) or not is_power_of_two(rope_dim, least=32):
        raise ValueError(f"q has {latent_dim} latent and {rope_dim} rope columns, not powers of two from 128 and 32 on")
    parts = row_parts(layout, latent_dim, rope_dim)
    if layout == "dsa656" and latent_dim != NUM_TILES * SCALE_COLS:
        raise ValueError(f"dsa656 is decoded with {NUM_TILES * SCALE_COLS} latent columns, not {latent_dim}")
    if cache.dtype != torch.uint8 or cache.ndim != 3 or not cache.is_contiguous():
        raise ValueError(f"cache must be contiguous uint8 [pages, page_size, bytes], not {seen(cache)}")
    if cache.shape[2] != parts.end:
        raise ValueError(f"a row of {layout} has {parts.end} bytes, not {cache.shape[2]}")
    if not is_power_of_two(cache.shape[1], least=1):
        raise ValueError(f"the page size is {cache.shape[1]}, no power of two")
    return parts
