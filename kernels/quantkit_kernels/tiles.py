"""Which part of a product one program takes: by shapes and the GPU alone, so that a call gives the same bytes again.

What was measured on this GPU comes first (``tuned.py``), then what bytes and processors of an H200 ask for.
"""

from dataclasses import dataclass

from quantkit_kernels.launch import LEAST_TOKENS
from quantkit_kernels.tuned import tuned_tile

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


def gemm_tile(*, num_tokens: int, num_rows: int, num_cols: int, gpu: str = "") -> GemmTile:
    """As few splits as fill the GPU: each costs four bytes an output, written and read."""
    tuned = tuned_tile("dense", (num_rows, num_cols), num_tokens=num_tokens, gpu=gpu, make=GemmTile)
    if tuned is not None:
        return tuned
    block_n = 128 if num_rows > 64 else 64
    block_m = max(LEAST_TOKENS, next((size for size in (8, 16, 32) if num_tokens <= size), 64))
    num_programs = -(-num_rows // block_n) * -(-num_tokens // block_m)
    num_tiles = -(-num_cols // 128)
    split_k = 1
    while num_programs * split_k * 2 <= _PROGRAMS and num_tiles // (split_k * 2) >= _MIN_TILES_PER_SPLIT:
        split_k *= 2
    return GemmTile(block_n=block_n, block_m=block_m, split_k=split_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeTile:
    """``block_m`` pairs of token and expert; a program's rows in both products; splits of the first one's columns."""

    gate_up_n: int
    down_n: int
    block_m: int
    split_k: int
    is_sorted: bool
    num_warps: int = 4
    num_stages: int = 4


_MOST_UNSORTED = 4  # tokens
_PADDING = 2.5  # experts times block over pairs, from which on a smaller block wastes less


def moe_tile(*, num_tokens: int, top_k: int, experts: tuple[int, int, int], gpu: str = "") -> MoeTile:
    """Small blocks while most experts have few tokens. ``experts``: their number, width, and columns of the input."""
    tuned = tuned_tile("moe", experts, num_tokens=num_tokens, gpu=gpu, make=MoeTile)
    if tuned is not None:
        return tuned
    num_experts, width, num_cols = experts
    num_pairs = num_tokens * top_k
    is_sorted = num_tokens > _MOST_UNSORTED
    block_m = 64
    while block_m > LEAST_TOKENS and num_experts * block_m >= _PADDING * num_pairs:
        block_m //= 2
    gate_up_n = 64
    num_programs = -(-width // gate_up_n) * min(num_pairs, num_experts)
    num_tiles = -(-num_cols // 128)
    split_k = 1
    while num_programs * split_k * 2 <= _PROGRAMS and num_tiles // (split_k * 2) >= _MIN_TILES_PER_SPLIT:
        split_k *= 2
    return MoeTile(
        gate_up_n=gate_up_n,
        down_n=128 if num_cols > 64 else 64,
        block_m=block_m if is_sorted else LEAST_TOKENS,
        split_k=split_k,
        is_sorted=is_sorted,
    )
