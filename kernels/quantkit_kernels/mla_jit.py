"""The kernel behind mla.py: one split of one sequence for a tile of heads.

The latent part is cut into four tiles, each with its own accumulator: with 512 columns a tile is what shares a scale in
the 656-byte row, and a dot of a whole row would need more registers than there are. Suffixes as in attention_jit.py.
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
from quantkit_kernels.bits_jit import to_bf16, widen

_LEAST_SCALE = tl.constexpr(2.0**-60)  # bounds the sums of tokens whose scales are all smaller


@triton.jit
def _load(ptr, at_R, is_row_R, column, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(ptr + at_R[:, None] + (column + tl.arange(0, WIDTH))[None, :], mask=is_row_R[:, None], other=0.0)


@triton.jit
def _load_tiles(ptr, at_R, is_row_R, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The four tiles of latent rows."""
    return (
        _load(ptr, at_R, is_row_R, 0, TILE),
        _load(ptr, at_R, is_row_R, TILE, TILE),
        _load(ptr, at_R, is_row_R, 2 * TILE, TILE),
        _load(ptr, at_R, is_row_R, 3 * TILE, TILE),
    )


@triton.jit
def _load_scales(ptr, is_T):  # type: ignore[no-untyped-def]
    return (
        tl.load(ptr, mask=is_T, other=0.0),
        tl.load(ptr + 1, mask=is_T, other=0.0),
        tl.load(ptr + 2, mask=is_T, other=0.0),
        tl.load(ptr + 3, mask=is_T, other=0.0),
    )


@triton.jit
def _scaled(p_TH, scales):  # type: ignore[no-untyped-def]
    return (
        p_TH * scales[0][:, None],
        p_TH * scales[1][:, None],
        p_TH * scales[2][:, None],
        p_TH * scales[3][:, None],
    )


@triton.jit
def _log2_of_largest(scales):  # type: ignore[no-untyped-def]
    scale_T = tl.maximum(tl.maximum(scales[0], scales[1]), tl.maximum(scales[2], scales[3]))
    return tl.log2(tl.maximum(scale_T, _LEAST_SCALE))


@triton.jit
def _largest(values_HC, INTERPRET: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.max(tl.abs(widen(values_HC, INTERPRET)), axis=1)


@triton.jit
def _largest_of_tiles(tiles, INTERPRET: tl.constexpr):  # type: ignore[no-untyped-def]
    low_H = tl.maximum(_largest(tiles[0], INTERPRET), _largest(tiles[1], INTERPRET))
    return tl.maximum(low_H, tl.maximum(_largest(tiles[2], INTERPRET), _largest(tiles[3], INTERPRET)))


@triton.jit
def _terms(query_HC, inverse_H, IS_FP8: tl.constexpr, INTERPRET: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is multiplied with keys of a dtype: two E4M3, or BF16 (and what is not used), times a power of two."""
    scaled_HC = widen(query_HC, INTERPRET) * inverse_H[:, None]
    if IS_FP8:
        return two_terms(scaled_HC, INTERPRET)
    elif INTERPRET:
        return to_bf16(scaled_HC), scaled_HC
    else:
        return scaled_HC.to(tl.bfloat16), scaled_HC


@triton.jit
def _terms_of_tiles(tiles, inverse_H, IS_FP8: tl.constexpr, INTERPRET: tl.constexpr):  # type: ignore[no-untyped-def]
    return (
        _terms(tiles[0], inverse_H, IS_FP8, INTERPRET),
        _terms(tiles[1], inverse_H, IS_FP8, INTERPRET),
        _terms(tiles[2], inverse_H, IS_FP8, INTERPRET),
        _terms(tiles[3], inverse_H, IS_FP8, INTERPRET),
    )


@triton.jit
def _load_query(  # type: ignore[no-untyped-def]
    q_ptr,
    at_H,
    is_head_H,
    TILE: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_FP8: tl.constexpr,
    ROPE_FP8: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Terms of the latent tiles, terms of the rope part, and what their products have to be multiplied by."""
    tiles = _load_tiles(q_ptr, at_H, is_head_H, TILE)
    rope_HC = _load(q_ptr, at_H, is_head_H, 4 * TILE, ROPE)
    unit_H = tl.full((rope_HC.shape[0],), 1.0, tl.float32)
    inverse_H = unit_H
    if LATENT_FP8:
        amax_H = _largest_of_tiles(tiles, INTERPRET)
        if ROPE_FP8:
            amax_H = tl.maximum(amax_H, _largest(rope_HC, INTERPRET))
        unit_H, inverse_H = amax_unit(amax_H)
    terms = _terms_of_tiles(tiles, inverse_H, LATENT_FP8, INTERPRET)
    return terms, _terms(rope_HC, inverse_H, ROPE_FP8, INTERPRET), unit_H


@triton.jit(do_not_specialize=["max_pages", "num_splits"])
def mla_decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    latent_ptr,
    rope_ptr,
    tile_scale_ptr,
    page_table_ptr,
    seq_lens_ptr,
    out_ptr,
    lse_ptr,
    score_scale,
    value_scale,
    num_heads,
    max_pages,
    num_splits,
    TILE: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_ROW: tl.constexpr,
    ROPE_ROW: tl.constexpr,
    ROPE_START: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    SCALE_START: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """``score_scale`` is in powers of two; ``*_ROW``, ``*_START`` count elements of a pointer; SCALE_ROW may be 0."""
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    head_H = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head_H = head_H < num_heads
    row_H = batch * num_heads + head_H
    LATENT: tl.constexpr = 4 * TILE
    LATENT_FP8: tl.constexpr = latent_ptr.dtype.element_ty == tl.float8e4nv
    ROPE_FP8: tl.constexpr = rope_ptr.dtype.element_ty == tl.float8e4nv
    at_H = row_H * (LATENT + ROPE)
    query, rope_query, factor_H = _load_query(q_ptr, at_H, is_head_H, TILE, ROPE, LATENT_FP8, ROPE_FP8, INTERPRET)
    factor_H = factor_H * score_scale
    largest_H = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    sums_TH = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    zeros_CH = tl.zeros((TILE, BLOCK_H), tl.float32)
    acc = (zeros_CH, zeros_CH, zeros_CH, zeros_CH)
    start, end = split_range(seq_lens_ptr, batch, split, num_splits, max_pages * PAGE_SIZE, BLOCK_T)
    for first in range(start, end, BLOCK_T):
        row_T, is_T = block_rows(page_table_ptr + batch * max_pages, first, end, BLOCK_T, PAGE_SIZE)
        keys = _load_tiles(latent_ptr, row_T * LATENT_ROW, is_T, TILE)
        rope_TC = _load(rope_ptr, row_T * ROPE_ROW, is_T, ROPE_START, ROPE)
        s_TH = scores(rope_TC, rope_query, INTERPRET)
        if SCALE_ROW > 0:
            scales = _load_scales(tile_scale_ptr + row_T * SCALE_ROW + SCALE_START, is_T)
            for tile in tl.static_range(4):
                s_TH += scores(keys[tile], query[tile], INTERPRET) * scales[tile][:, None]
            lift_TH = _log2_of_largest(scales)[:, None]
        else:
            for tile in tl.static_range(4):
                s_TH += scores(keys[tile], query[tile], INTERPRET)
            lift_TH = tl.zeros((BLOCK_T, 1), tl.float32)
        s_TH = tl.where(is_T[:, None], s_TH * factor_H[None, :], float("-inf"))
        p_TH, decay_H, largest_H, sums_TH = softmax_step(s_TH, lift_TH, largest_H, sums_TH)
        weights = (p_TH, p_TH, p_TH, p_TH)
        if SCALE_ROW > 0:
            weights = _scaled(p_TH, scales)
        acc = (
            add_values(acc[0], keys[0], is_T, weights[0], decay_H, INTERPRET),
            add_values(acc[1], keys[1], is_T, weights[1], decay_H, INTERPRET),
            add_values(acc[2], keys[2], is_T, weights[2], decay_H, INTERPRET),
            add_values(acc[3], keys[3], is_T, weights[3], decay_H, INTERPRET),
        )

    weight_H, lse_H = normalize(sums_TH, largest_H, value_scale, IS_WHOLE)
    slot_H = row_H * num_splits + split
    if IS_WHOLE or start < end:
        for tile in tl.static_range(4):
            store_heads(out_ptr, slot_H, acc[tile], weight_H, is_head_H, tile * TILE, LATENT)
    tl.store(lse_ptr + slot_H, lse_H, mask=is_head_H)
