"""The kernels behind moe.py. Legend: N weight rows, M pairs of token and expert, K columns, I the expert's width.

A block is up to ``BLOCK_M`` pairs of one expert; without sorting each pair is a block of its own.
"""

import triton
import triton.language as tl

from quantkit_kernels.bits_jit import widen
from quantkit_kernels.gemm_jit import load_activations, load_tile, narrow
from quantkit_kernels.int4_decode_jit import TILE_COLS, row_of
from quantkit_kernels.moe_align_jit import local_expert


@triton.jit
def _silu_times(gate, up):  # type: ignore[no-untyped-def]
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _block_of(  # type: ignore[no-untyped-def]
    pairs_ptr,
    experts_ptr,
    map_ptr,
    block,
    num_pairs,
    num_global,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    IS_SORTED: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """A block's pairs (``num_pairs`` is padding) and expert (``NUM_EXPERTS``: none). Unsorted: ids are the experts."""
    item = tl.arange(0, BLOCK_M)
    if IS_SORTED:
        pairs = tl.load(pairs_ptr + block * BLOCK_M + item).to(tl.int64)
        expert = tl.load(experts_ptr + block)
    else:
        pairs = tl.where(item == 0, block, num_pairs).to(tl.int64)
        expert = local_expert(tl.load(experts_ptr + block), map_ptr, num_global, NUM_EXPERTS, HAS_MAP)
    return pairs, expert


@triton.jit(do_not_specialize=["num_pairs", "num_global"])
def gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    words_ptr,
    scale_ptr,
    out_ptr,
    pairs_ptr,
    experts_ptr,
    map_ptr,
    num_blocks_ptr,
    num_pairs,
    num_global,
    I: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    WARPS: tl.constexpr,
    IS_SORTED: tl.constexpr,
    HAS_MAP: tl.constexpr,
    IS_REPACKED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """SiLU of the gate times up, [pairs, I] in BF16; with splits their float32 parts [SPLIT_K, pairs, 2 I]."""
    # rows of a block side by side: its weights are read once; all on one axis, since others end at 65,535
    ROW_BLOCKS: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // ROW_BLOCKS
    if IS_SORTED:
        if block >= tl.load(num_blocks_ptr):
            return
    pairs, expert = _block_of(
        pairs_ptr, experts_ptr, map_ptr, block, num_pairs, num_global, NUM_EXPERTS, BLOCK_M, IS_SORTED, HAS_MAP
    )
    if expert == NUM_EXPERTS:
        return
    is_pair = pairs < num_pairs
    NUM_TILES: tl.constexpr = (K + TILE_COLS - 1) // TILE_COLS
    PER_SPLIT: tl.constexpr = (NUM_TILES + SPLIT_K - 1) // SPLIT_K
    HAS_ALL_TILES: tl.constexpr = PER_SPLIT * SPLIT_K == NUM_TILES
    IS_WHOLE: tl.constexpr = I % BLOCK_N == 0 and HAS_ALL_TILES
    HAS_ALL_COLS: tl.constexpr = NUM_TILES * TILE_COLS == K and HAS_ALL_TILES
    words, scales = _of_expert(words_ptr, scale_ptr, expert, 2 * I, K, GROUP, IS_REPACKED)
    split = tl.program_id(2)
    first = (tl.program_id(0) % ROW_BLOCKS) * BLOCK_N
    loaded = (first + row_of(tl.arange(0, BLOCK_N), WARPS)).to(tl.int64)
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(PER_SPLIT):
        tile = split * PER_SPLIT + step
        mask = loaded < tl.where(tile < NUM_TILES, I, 0)
        x = load_activations(x_ptr, pairs // TOP_K, is_pair, tile, K, BLOCK_M, HAS_ALL_COLS, INTERPRET)
        weights = load_tile(
            words, scales, tile, loaded, mask, 2 * I, K, GROUP, BLOCK_N, WARPS, IS_WHOLE, IS_REPACKED, INTERPRET
        )
        gate = tl.dot(weights, x, gate)
        weights = load_tile(
            words, scales, tile, loaded + I, mask, 2 * I, K, GROUP, BLOCK_N, WARPS, IS_WHOLE, IS_REPACKED, INTERPRET
        )
        up = tl.dot(weights, x, up)
    rows = (first + tl.arange(0, BLOCK_N))[:, None]
    inside = (rows < I) & is_pair[None, :]
    if SPLIT_K == 1:
        hidden = _silu_times(gate, up)
        tl.store(out_ptr + pairs[None, :] * I + rows, narrow(hidden, out_ptr, INTERPRET), mask=inside)
    else:
        at = (split.to(tl.int64) * num_pairs + pairs)[None, :] * (2 * I) + rows
        tl.store(out_ptr + at, gate, mask=inside)
        tl.store(out_ptr + at + I, up, mask=inside)


@triton.jit(do_not_specialize=["num_pairs"])
def silu_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    out_ptr,
    num_pairs,
    I: tl.constexpr,  # noqa: E741
    SPLIT_K: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """The splits' parts added one after the other, then SiLU of the gate times up: [pairs, I] in BF16."""
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < I
    gate = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLIT_K):
        at = (num_pairs * split + pair) * (2 * I) + column
        gate += tl.load(parts_ptr + at, mask=mask, other=0.0)
        up += tl.load(parts_ptr + at + I, mask=mask, other=0.0)
    tl.store(out_ptr + pair * I + column, narrow(_silu_times(gate, up), out_ptr, INTERPRET), mask=mask)


@triton.jit(do_not_specialize=["num_pairs", "num_global"])
def down_kernel(  # type: ignore[no-untyped-def]
    hidden_ptr,
    words_ptr,
    scale_ptr,
    weights_ptr,
    out_ptr,
    pairs_ptr,
    experts_ptr,
    map_ptr,
    num_blocks_ptr,
    num_pairs,
    num_global,
    N: tl.constexpr,
    K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WARPS: tl.constexpr,
    IS_SORTED: tl.constexpr,
    HAS_MAP: tl.constexpr,
    IS_REPACKED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Each pair's output times its router weight, [pairs, N] in BF16."""
    # rows of a block side by side: its weights are read once; all on one axis, since others end at 65,535
    ROW_BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // ROW_BLOCKS
    if IS_SORTED:
        if block >= tl.load(num_blocks_ptr):
            return
    pairs, expert = _block_of(
        pairs_ptr, experts_ptr, map_ptr, block, num_pairs, num_global, NUM_EXPERTS, BLOCK_M, IS_SORTED, HAS_MAP
    )
    if expert == NUM_EXPERTS:
        return
    is_pair = pairs < num_pairs
    NUM_TILES: tl.constexpr = (K + TILE_COLS - 1) // TILE_COLS
    words, scales = _of_expert(words_ptr, scale_ptr, expert, N, K, GROUP, IS_REPACKED)
    first = (tl.program_id(0) % ROW_BLOCKS) * BLOCK_N
    loaded = (first + row_of(tl.arange(0, BLOCK_N), WARPS)).to(tl.int64)
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in range(NUM_TILES):
        x = load_activations(hidden_ptr, pairs, is_pair, tile, K, BLOCK_M, NUM_TILES * TILE_COLS == K, INTERPRET)
        weights = load_tile(
            words,
            scales,
            tile,
            loaded,
            loaded < N,
            N,
            K,
            GROUP,
            BLOCK_N,
            WARPS,
            N % BLOCK_N == 0,
            IS_REPACKED,
            INTERPRET,
        )
        sums = tl.dot(weights, x, sums)
    sums *= tl.load(weights_ptr + pairs, mask=is_pair, other=0.0)[None, :]
    rows = (first + tl.arange(0, BLOCK_N))[:, None]
    tl.store(out_ptr + pairs[None, :] * N + rows, narrow(sums, out_ptr, INTERPRET), mask=(rows < N) & is_pair[None, :])


@triton.jit(do_not_specialize=["num_global"])
def sum_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    ids_ptr,
    map_ptr,
    out_ptr,
    num_global,
    N: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_MAP: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """A token's outputs added in the order of its choices; experts that are not here add nothing."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = local_expert(tl.load(ids_ptr + pair), map_ptr, num_global, NUM_EXPERTS, HAS_MAP)
        mask = column < tl.where(expert < NUM_EXPERTS, N, 0)
        part = tl.load(parts_ptr + pair * N + column, mask=mask, other=0.0)
        total += widen(part, INTERPRET)
    tl.store(out_ptr + token * N + column, narrow(total, out_ptr, INTERPRET), mask=column < N)


@triton.jit
def _of_expert(  # type: ignore[no-untyped-def]
    words_ptr,
    scale_ptr,
    expert,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    IS_REPACKED: tl.constexpr,
):
    """Where an expert's words and scales begin; a repacked weight has whole tiles."""
    COLS: tl.constexpr = (K + TILE_COLS - 1) // TILE_COLS * TILE_COLS if IS_REPACKED else K
    wide = expert.to(tl.int64)
    return words_ptr + wide * (N * COLS // 8), scale_ptr + wide * (N * COLS // GROUP)
