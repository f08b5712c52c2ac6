"""The kernels behind gemm.py. Legend: N weight rows, M tokens, K columns; weights stand on the left of the dot.

With weights on its left side, wgmma takes them from registers, where they were decoded, and pads tokens to 8 or 16
instead of 64.
"""

import triton
import triton.language as tl

from quantkit_kernels.bits_jit import to_bf16, widen_bf16
from quantkit_kernels.int4_decode_jit import TILE_COLS, TILE_WORDS, decode_tile, row_of


@triton.jit
def narrow(values, out_ptr, INTERPRET: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 as the output wants it; the interpreter would cut BF16 off instead of rounding it."""
    if INTERPRET and out_ptr.dtype.element_ty == tl.bfloat16:
        return to_bf16(values)
    else:
        return values.to(out_ptr.dtype.element_ty)


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]
    words_ptr,
    scale_ptr,
    tile,
    rows,
    mask,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_REPACKED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Decoded weights [BLOCK_N, 128] of tile number ``tile``; rows that ``mask`` leaves out are zeros.

    ``IS_WHOLE``: it leaves none out.
    """
    place = tl.arange(0, TILE_WORDS)[None, :]
    SCALES: tl.constexpr = TILE_COLS // GROUP
    number = tl.arange(0, SCALES)[None, :]
    if IS_REPACKED:
        words_at = words_ptr + (tile * N + rows)[:, None] * TILE_WORDS + place
        scale_at = scale_ptr + (tile * N + rows)[:, None] * SCALES + number
        if IS_WHOLE:
            words = tl.load(words_at, eviction_policy="evict_first")
            scales = tl.load(scale_at)
        else:
            words = tl.load(words_at, mask=mask[:, None], other=0, eviction_policy="evict_first")
            scales = tl.load(scale_at, mask=mask[:, None], other=0.0)
        # words 4 * t + p of a group of 32 columns p
        scales = tl.reshape(tl.broadcast_to(scales[:, :, None], (BLOCK_N, SCALES, 4 // SCALES)), (BLOCK_N, 1, 4))
        scale = tl.reshape(tl.broadcast_to(scales, (BLOCK_N, 4, 4)), (BLOCK_N, TILE_WORDS))
    else:
        word = tile * TILE_WORDS + place
        words = tl.load(words_ptr + rows[:, None] * (K // 8) + word, mask=mask[:, None] & (word < K // 8), other=0)
        group = tile * SCALES + number
        inside = mask[:, None] & (group < K // GROUP)
        scales = tl.load(scale_ptr + rows[:, None] * (K // GROUP) + group, mask=inside, other=0.0)
        scale = tl.reshape(
            tl.broadcast_to(scales[:, :, None], (BLOCK_N, SCALES, TILE_WORDS // SCALES)), (BLOCK_N, TILE_WORDS)
        )
    return decode_tile(words, scale, BLOCK_N, WARPS, IS_REPACKED, INTERPRET)


@triton.jit
def load_activations(  # type: ignore[no-untyped-def]
    x_ptr, rows, is_row, tile, K: tl.constexpr, BLOCK_M: tl.constexpr, IS_WHOLE: tl.constexpr, INTERPRET: tl.constexpr
):
    """Activations [128, BLOCK_M] of a tile of columns; ``IS_WHOLE``: all columns are there."""
    at = tile * TILE_COLS + tl.arange(0, TILE_COLS)
    if IS_WHOLE:
        inside = tl.broadcast_to(is_row[None, :], (TILE_COLS, BLOCK_M))
    else:
        inside = (at < K)[:, None] & is_row[None, :]
    x = tl.load(x_ptr + rows[None, :] * K + at[:, None], mask=inside, other=0.0)
    if INTERPRET:
        x = widen_bf16(x)
    return x


@triton.jit(do_not_specialize=["num_tokens"])
def gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    words_ptr,
    scale_ptr,
    out_ptr,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    WARPS: tl.constexpr,
    IS_REPACKED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """out [SPLIT_K, M, N]: each split's own part of the columns; ``sum_splits_kernel`` adds several."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_N
    loaded = first + row_of(tl.arange(0, BLOCK_N), WARPS)
    rows = first + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    is_row = rows < N
    is_token = tokens < num_tokens
    NUM_TILES: tl.constexpr = (K + TILE_COLS - 1) // TILE_COLS
    PER_SPLIT: tl.constexpr = (NUM_TILES + SPLIT_K - 1) // SPLIT_K
    HAS_ALL_TILES: tl.constexpr = PER_SPLIT * SPLIT_K == NUM_TILES
    IS_WHOLE: tl.constexpr = N % BLOCK_N == 0 and HAS_ALL_TILES
    HAS_ALL_COLS: tl.constexpr = NUM_TILES * TILE_COLS == K and HAS_ALL_TILES
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(PER_SPLIT):
        tile = split * PER_SPLIT + step
        weights = load_tile(
            words_ptr,
            scale_ptr,
            tile,
            loaded,
            loaded < tl.where(tile < NUM_TILES, N, 0),
            N,
            K,
            GROUP,
            BLOCK_N,
            WARPS,
            IS_WHOLE,
            IS_REPACKED,
            INTERPRET,
        )
        x = load_activations(x_ptr, tokens, is_token, tile, K, BLOCK_M, HAS_ALL_COLS, INTERPRET)
        sums = tl.dot(weights, x, sums)
    at = (split * num_tokens + tokens)[None, :] * N + rows[:, None]
    tl.store(out_ptr + at, narrow(sums, out_ptr, INTERPRET), mask=is_row[:, None] & is_token[None, :])


@triton.jit(do_not_specialize=["num_items"])
def sum_splits_kernel(  # type: ignore[no-untyped-def]
    parts_ptr, out_ptr, num_items, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr, INTERPRET: tl.constexpr
):
    """The splits' parts, added one after the other: the same sum in every run."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_items
    total = tl.load(parts_ptr + at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLIT_K):
        total += tl.load(parts_ptr + at + split * num_items, mask=mask, other=0.0)
    tl.store(out_ptr + at, narrow(total, out_ptr, INTERPRET), mask=mask)


@triton.jit
def dequantize_kernel(  # type: ignore[no-untyped-def]
    words_ptr,
    scale_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    IS_REPACKED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """A tile of the weight in BF16."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_N
    loaded = first + row_of(tl.arange(0, BLOCK_N), WARPS)
    tile = tl.program_id(1)
    weights = load_tile(
        words_ptr, scale_ptr, tile, loaded, loaded < N, N, K, GROUP, BLOCK_N, WARPS, False, IS_REPACKED, INTERPRET
    )
    rows = (first + tl.arange(0, BLOCK_N))[:, None]
    column = (tile * TILE_COLS + tl.arange(0, TILE_COLS))[None, :]
    tl.store(out_ptr + rows * K + column, narrow(weights, out_ptr, INTERPRET), mask=(rows < N) & (column < K))
