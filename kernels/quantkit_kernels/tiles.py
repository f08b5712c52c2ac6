"""Which part of a product one program takes: by shapes and the GPU alone, so that a call gives the same bytes again.

What was measured on this GPU comes first (``tuned.py``), then what bytes and SMs ask for. Making a tile that no kernel
could run with raises ValueError.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton

from quantkit_kernels.kv_layout import Layout
from quantkit_kernels.tuned import NO_GPU, Gpu, tuned_tile
from quantkit_kernels.word_order import TILE_COLS

# before Triton 3.9 a dot with 8 columns leaves the tensor cores of a warp group, and shuffles
LEAST_TOKENS = 8 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 16
_PROGRAMS_PER_SM = 2
_MIN_TILES_PER_SPLIT = 4  # of 128 columns: fewer do not fill the pipeline of loads


_ALLOWED = {
    "block_n": (64, 128, 256),
    "gate_up_n": (64, 128, 256),
    "down_n": (64, 128, 256),
    "block_m": (8, 16, 32, 64),
    "split_k": range(1, 257),
    "num_warps": (4, 8),
    "num_stages": range(1, 7),
}


def _check_tile(tile: "GemmTile | MoeTile") -> None:
    """Raise ValueError for a tile with which outputs would stay unwritten, or a kernel would not compile."""
    sizes = {name: getattr(tile, name) for name in tile.__slots__}
    if type(sizes.pop("is_sorted", False)) is not bool:
        raise ValueError("is_sorted is neither true nor false")
    for name, size in sizes.items():
        allowed = _ALLOWED[name]
        if type(size) is not int or size not in allowed:
            numbers = f"from 1 to {allowed[-1]}" if isinstance(allowed, range) else f"one of {allowed}"
            raise ValueError(f"{name} is {size!r}, not {numbers}")
        if allowed[0] == 64 and size % (16 * tile.num_warps):
            raise ValueError(f"{name} is {size}: {tile.num_warps} warps have no 16 rows each")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTile:
    """``block_n`` weight rows and ``block_m`` tokens, a ``split_k``-th of the columns."""

    block_n: int
    block_m: int
    split_k: int
    num_warps: int = 4
    num_stages: int = 4

    def __post_init__(self) -> None:
        _check_tile(self)


class DenseShape(NamedTuple):
    """A weight, as tables of tiles name it."""

    num_rows: int
    num_cols: int
    group_size: int


def gemm_tile(shape: DenseShape, *, num_tokens: int, is_repacked: bool = True, gpu: Gpu = NO_GPU) -> GemmTile:
    """As few splits as fill the GPU: each costs four bytes an output, written and read."""
    if is_repacked:  # tables are of such words
        tuned = tuned_tile("dense", shape, num_tokens=num_tokens, gpu=gpu.name, make=GemmTile)
        if tuned is not None:
            return tuned
    block_n = 128 if shape.num_rows > 64 else 64
    block_m = max(LEAST_TOKENS, next((size for size in (8, 16, 32) if num_tokens <= size), 64))
    num_programs = -(-shape.num_rows // block_n) * -(-num_tokens // block_m)
    return GemmTile(block_n=block_n, block_m=block_m, split_k=_splits(num_programs, shape.num_cols, gpu))


def _splits(num_programs: int, num_cols: int, gpu: Gpu) -> int:
    """The most splits of the columns with which all programs still run at once; a power of two."""
    num_tiles = -(-num_cols // TILE_COLS)
    split_k = 1
    while (
        num_programs * split_k * 2 <= _PROGRAMS_PER_SM * gpu.num_sms
        and num_tiles // (split_k * 2) >= _MIN_TILES_PER_SPLIT
    ):
        split_k *= 2
    return split_k


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

    def __post_init__(self) -> None:
        _check_tile(self)


class MoeShape(NamedTuple):
    """The experts that are here, as tables of tiles name them: their number, width, and columns of the input."""

    num_experts: int
    width: int
    num_cols: int
    group_size: int
    top_k: int


_MOST_UNSORTED = 4  # tokens
_PADDING = 2.5  # experts times block over pairs, from which on a smaller block wastes less


def moe_tile(
    shape: MoeShape,
    *,
    num_tokens: int,
    num_global: int | None = None,
    is_repacked: bool = True,
    gpu: Gpu = NO_GPU,
) -> MoeTile:
    """Small blocks while most experts have few tokens. ``num_global``: experts of all ranks, None if all are here."""
    if is_repacked and num_global is None:  # tables are of such words, and of all experts
        tuned = tuned_tile("moe", shape, num_tokens=num_tokens, gpu=gpu.name, make=MoeTile)
        if tuned is not None:
            return tuned
    # tokens choose among all experts: a rank has its share of the pairs
    num_pairs = -(-num_tokens * shape.top_k * shape.num_experts // max(num_global or shape.num_experts, 1))
    is_sorted = num_tokens > _MOST_UNSORTED
    block_m = 64
    while block_m > LEAST_TOKENS and shape.num_experts * block_m >= _PADDING * num_pairs:
        block_m //= 2
    gate_up_n = 64
    num_programs = -(-shape.width // gate_up_n) * min(num_pairs, shape.num_experts)
    return MoeTile(
        gate_up_n=gate_up_n,
        down_n=128 if shape.num_cols > 64 else 64,
        block_m=block_m if is_sorted else LEAST_TOKENS,
        split_k=_splits(num_programs, shape.num_cols, gpu),
        is_sorted=is_sorted,
    )


class AttentionTile(NamedTuple):
    """What one program of decode works on. ``per_sm``: programs that an SM holds at once, by registers and memory."""

    block_tokens: int
    block_heads: int
    num_warps: int
    num_stages: int
    per_sm: int


BLOCK_TOKENS = 64  # what fills a wgmma


def mla_tile(layout: Layout, num_heads: int) -> AttentionTile:
    """The tiles that spill nothing on sm_90; tests/kernels/test_mla_decode_compiled.py holds them to it."""
    if layout == "bf16":
        return AttentionTile(BLOCK_TOKENS, block_heads=16, num_warps=4, num_stages=2, per_sm=1)
    if layout == "flat576" and num_heads > 8:
        return AttentionTile(BLOCK_TOKENS, block_heads=16, num_warps=8, num_stages=2, per_sm=1)
    return AttentionTile(BLOCK_TOKENS, block_heads=8, num_warps=4, num_stages=2, per_sm=2)


def gqa_tile(group: int) -> AttentionTile:
    """``group``: heads that share one of the cache."""
    return AttentionTile(BLOCK_TOKENS, block_heads=8 if group <= 8 else 16, num_warps=4, num_stages=3, per_sm=2)
