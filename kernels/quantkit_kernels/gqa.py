"""GQA decode over a paged KV cache, BF16 or E4M3: one query token of each sequence, and the lse that splits merge by.

The heads that share a head of the cache are the columns of both dots, tokens the rows (see mla.py, which also
says how FP8 queries, values and probabilities are held). Keys and values may differ in dtype.

Per token, sequence and head of the cache (D = 128; at 4.3 TB/s): 512 bytes in BF16, 0.119 ns; 256 in FP8, 0.060 ns.
FLOPs a head of the query: 4 * 128, and 2 * 128 more for the query's second term in FP8.
"""

import torch
import triton

from quantkit_kernels.checks import check_devices, check_inference, seen
from quantkit_kernels.gqa_jit import gqa_decode_kernel
from quantkit_kernels.kv_layout import check_scale
from quantkit_kernels.launch import IS_INTERPRETED, check_runs, launches
from quantkit_kernels.split_kv import (
    LOG2_E,
    Parts,
    check_alignment,
    check_sequences,
    is_power_of_two,
    num_slots,
    plan_splits,
)
from quantkit_kernels.tiles import gqa_tile

DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.uint8)


@launches
def gqa_decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` BF16 [B, H, D] and ``lse`` float32 [B, H].

    ``q`` BF16 [B, H, D]; caches BF16 or E4M3 (float8_e4m3fn or uint8) [pages, page_size, H_kv, D]; ``page_table`` int32
    [B, max_pages]; ``seq_lens`` int32 [B], zero for ``out`` 0 and ``lse`` -inf; lengths beyond the table are cut to it.
    Head h reads head h // (H / H_kv) of the cache. Scales are of E4M3 caches. Nothing behind a sequence's end is read.
    Raises ValueError for what does not go together, RuntimeError where a gradient is wanted.
    """
    check_inference(q)
    check_sequences(q, page_table, seq_lens, num_splits)
    _check_caches(q, key_cache, value_cache)
    _check_scale("key", key_cache, key_scale)
    _check_scale("value", value_cache, value_scale)
    check_alignment(q=q, key_cache=key_cache, value_cache=value_cache)
    check_devices(q=q, key_cache=key_cache, value_cache=value_cache, page_table=page_table, seq_lens=seq_lens)
    caches = (key_cache, value_cache)
    num_seqs, num_heads, width = q.shape
    page_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    tile = gqa_tile(group)
    programs = num_kv_heads * triton.cdiv(group, tile.block_heads)
    if num_splits is None:
        num_blocks = triton.cdiv(page_table.shape[1] * page_size, tile.block_tokens)
        num_splits = plan_splits(num_seqs * programs, num_blocks, num_slots(q.device, tile))
    parts = Parts((num_seqs, num_heads, width), num_splits, q.device)
    if parts.out.numel():
        check_runs(q)
        gqa_decode_kernel[(programs, num_splits, num_seqs)](
            q,
            *(cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache for cache in caches),
            page_table,
            seq_lens,
            parts.part_out,
            parts.part_lse,
            softmax_scale * key_scale * LOG2_E,
            value_scale,
            num_kv_heads,
            page_table.shape[1],
            num_splits,
            GROUP=group,
            WIDTH=width,
            PAGE_SIZE=page_size,
            BLOCK_H=tile.block_heads,
            BLOCK_T=tile.block_tokens,
            IS_WHOLE=num_splits == 1,
            INTERPRET=IS_INTERPRETED,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return parts.merge()


def _check_caches(q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.ndim != 4 or cache.dtype not in DTYPES or not cache.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous BF16, float8_e4m3fn or uint8 [pages, page_size, H_kv, D], not {seen(cache)}"
            )
        if cache.shape != key_cache.shape or cache.shape[3] != q.shape[2]:
            raise ValueError(f"{name} {tuple(cache.shape)} does not fit q {tuple(q.shape)} or the other cache")
    if key_cache.shape[2] == 0:
        raise ValueError(f"the caches {tuple(key_cache.shape)} have no heads")
    if q.shape[1] % key_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} heads do not share {key_cache.shape[2]} heads of the cache evenly")
    for name, number, least in (("head dimension", q.shape[2], 32), ("page size", key_cache.shape[1], 1)):
        if not is_power_of_two(number, least=least):
            raise ValueError(f"the {name} is {number}, no power of two from {least} on")


def _check_scale(name: str, cache: torch.Tensor, scale: float) -> None:
    check_scale(f"{name}_scale", scale)
    if cache.dtype == torch.bfloat16 and scale != 1.0:
        raise ValueError(f"{name}_cache is BF16, which has no scale beside it, and {name}_scale is {scale}")
