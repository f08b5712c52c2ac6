"""The kernel behind gqa.py: one split of one sequence for a tile of the heads that share a head of the cache.

Suffixes as in attention_jit.py.
"""

import triton
import triton.language as tl

from quantkit_kernels.attention_jit import (
    add_values,
    amax_unit,
    block_rows,
    normalize,
    scores,
    softmax_step,
    split_range,
    store_heads,
    two_terms,
)
from quantkit_kernels.bits_jit import widen


@triton.jit(do_not_specialize=["max_pages", "num_splits"])
def gqa_decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    key_ptr,
    value_ptr,
    page_table_ptr,
    seq_lens_ptr,
    out_ptr,
    lse_ptr,
    score_scale,
    value_scale,
    num_kv_heads,
    max_pages,
    num_splits,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """``score_scale`` is in powers of two; ``GROUP`` heads share one of the cache."""
    TILES: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(0) // TILES
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    member_H = tl.program_id(0) % TILES * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head_H = member_H < GROUP
    row_H = (batch * num_kv_heads + kv_head) * GROUP + member_H
    column_C = tl.arange(0, WIDTH)
    query_HC = tl.load(q_ptr + row_H[:, None] * WIDTH + column_C[None, :], mask=is_head_H[:, None], other=0.0)
    query = (query_HC, None)
    factor_H = tl.full((BLOCK_H,), 1.0, tl.float32)
    if key_ptr.dtype.element_ty == tl.float8e4nv:
        wide_HC = widen(query_HC, INTERPRET)
        factor_H, inverse_H = amax_unit(tl.max(tl.abs(wide_HC), axis=1))
        query = two_terms(wide_HC * inverse_H[:, None], INTERPRET)
    factor_H = factor_H * score_scale
    largest_H = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    sums_TH = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    acc_CH = tl.zeros((WIDTH, BLOCK_H), tl.float32)
    start, end = split_range(seq_lens_ptr, batch, split, num_splits, max_pages * PAGE_SIZE, BLOCK_T)
    for first in range(start, end, BLOCK_T):
        row_T, is_T = block_rows(page_table_ptr + batch * max_pages, first, end, BLOCK_T, PAGE_SIZE)
        at_TC = ((row_T * num_kv_heads + kv_head) * WIDTH)[:, None] + column_C[None, :]
        keys_TC = tl.load(key_ptr + at_TC, mask=is_T[:, None], other=0.0)
        values_TC = tl.load(value_ptr + at_TC, mask=is_T[:, None], other=0.0)
        s_TH = scores(keys_TC, query, INTERPRET) * factor_H[None, :]
        s_TH = tl.where(is_T[:, None], s_TH, float("-inf"))
        p_TH, decay_H, largest_H, sums_TH = softmax_step(s_TH, 0.0, largest_H, sums_TH)
        acc_CH = add_values(acc_CH, values_TC, is_T, p_TH, decay_H, INTERPRET)
    weight_H, lse_H = normalize(sums_TH, largest_H, value_scale, IS_WHOLE)
    slot_H = row_H * num_splits + split
    if IS_WHOLE or start < end:
        store_heads(out_ptr, slot_H, acc_CH, weight_H, is_head_H, 0, WIDTH)
    tl.store(lse_ptr + slot_H, lse_H, mask=is_head_H)
