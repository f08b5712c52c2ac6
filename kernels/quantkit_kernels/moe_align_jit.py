"""The kernel behind moe_align.py."""

import triton
import triton.language as tl


@triton.jit
def local_expert(expert, map_ptr, num_global, NUM_EXPERTS: tl.constexpr, HAS_MAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The local number of an id, int32; ``NUM_EXPERTS`` for none. Ids of 64 bits are narrowed when they are known."""
    if HAS_MAP:
        is_known = (expert >= 0) & (expert < num_global)
        expert = tl.load(map_ptr + tl.where(is_known, expert, 0), mask=is_known, other=-1)
    is_here = (expert >= 0) & (expert < NUM_EXPERTS)
    return tl.where(is_here, expert, NUM_EXPERTS).to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs", "num_global"])
def align_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,
    map_ptr,
    pairs_ptr,
    experts_ptr,
    num_blocks_ptr,
    num_pairs,
    num_global,
    NUM_EXPERTS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """A program counts all pairs, and places those of its own expert: nothing has to be told to another.

    Reads: the ids twice for each expert, from the cache; 4,096 tokens of 8 are 131 kB.
    """
    own = tl.program_id(0)
    bins = tl.arange(0, NUM_BINS)
    counts = tl.zeros((NUM_BINS,), tl.int32)
    first = 0
    while first < num_pairs:
        pairs = first + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
        expert = local_expert(ids, map_ptr, num_global, NUM_EXPERTS, HAS_MAP)
        counts += tl.histogram(expert, NUM_BINS)
        first += CHUNK
    blocks = tl.where(bins < NUM_EXPERTS, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    before = tl.sum(tl.where(bins < own, blocks, 0))
    count = tl.sum(tl.where(bins == own, counts, 0))
    if own == 0:
        tl.store(num_blocks_ptr, tl.sum(blocks))
    block = 0
    while block * BLOCK_M < count:
        tl.store(experts_ptr + before + block, own)
        block += 1
    placed = before * BLOCK_M
    first = 0
    while first < num_pairs:
        pairs = first + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
        expert = local_expert(ids, map_ptr, num_global, NUM_EXPERTS, HAS_MAP)
        is_own = (expert == own).to(tl.int32)
        place = placed + tl.cumsum(is_own, 0) - 1
        tl.store(pairs_ptr + place, pairs, mask=is_own != 0)
        placed += tl.sum(is_own)
        first += CHUNK
