"""Which part of a product one program takes: a function of shapes alone, so that the same call gives the same bytes."""

from dataclasses import dataclass

_PROGRAMS = 264  # two for each processor of an H200
_MIN_TILES_PER_SPLIT = 4  # of 128 columns: fewer do not fill the pipeline of loads


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTile:
    """``block_n`` weight rows and ``block_m`` tokens, a ``split_k``-th of the columns."""

    block_n: int
    block_m: int
    split_k: int
    num_warps: int = 4
    num_stages: int = 4


def gemm_tile(*, num_tokens: int, num_rows: int, num_cols: int) -> GemmTile:
    """As few splits as fill the GPU: each costs four bytes an output, written and read."""
    block_n = 128 if num_rows > 64 else 64
    block_m = next((size for size in (8, 16, 32) if num_tokens <= size), 64)
    num_programs = -(-num_rows // block_n) * -(-num_tokens // block_m)
    num_tiles = -(-num_cols // 128)
    split_k = 1
    while num_programs * split_k * 2 <= _PROGRAMS and num_tiles // (split_k * 2) >= _MIN_TILES_PER_SPLIT:
        split_k *= 2
    return GemmTile(block_n=block_n, block_m=block_m, split_k=split_k)
