#!/usr/bin/env python
"""Measures which tiles are fastest on this GPU and writes them where the kernels look for them.

For the shapes of GLM-5.2 and Kimi-K2 on eight GPUs and each number of tokens every tile of a small grid is timed as
bench_kernels.py does, the tile that is computed among them, and the fastest stays. Commit the file with the figures of
bench_kernels.py beside it. Nothing is ever tuned in a request.

    scripts/tune_kernels.py [--tokens 1,2,4] [-o kernels/quantkit_kernels/tuned/nvidia-h200.json]
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TypeVar

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))
from bench_cases import GROUP, Sizes, int4_bytes, random_int4
from bench_kernels import CALLS, graph_microseconds

from quantkit_kernels import repack
from quantkit_kernels.gemm import MAX_KERNEL_TOKENS, run_gemm
from quantkit_kernels.launch import LEAST_TOKENS
from quantkit_kernels.moe import run_moe
from quantkit_kernels.tiles import GemmTile, MoeTile, gemm_tile, moe_tile
from quantkit_kernels.tuned import file_of

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
Tile = TypeVar("Tile")


def gemm_tiles(computed: GemmTile) -> Iterator[GemmTile]:
    """The grid for a dense product, the computed tile first."""
    yield computed
    for block_n, split_k, num_stages in product((64, 128), (1, 2, 4, 8, 16), (3, 4)):
        for block_m in {computed.block_m, max(LEAST_TOKENS, computed.block_m // 2)}:
            yield GemmTile(block_n=block_n, block_m=block_m, split_k=split_k, num_stages=num_stages)


def moe_tiles(computed: MoeTile) -> Iterator[MoeTile]:
    """The grid for experts, the computed tile first."""
    yield computed
    for gate_up_n, down_n, split_k, num_stages in product((64, 128), (64, 128), (1, 4, 8), (3, 4)):
        for block_m in {computed.block_m, max(LEAST_TOKENS, computed.block_m // 2)}:
            yield replace(
                computed,
                gate_up_n=gate_up_n,
                down_n=down_n,
                split_k=split_k,
                num_stages=num_stages,
                block_m=block_m,
            )


def fastest(tiles: Iterable[Tile], microseconds: Callable[[Tile], float]) -> Tile:
    """The tile with the least time; the first one among equals. A tile that does not fit on the GPU has none."""
    best: tuple[float, Tile] | None = None
    for tile in dict.fromkeys(tiles):
        try:
            found = microseconds(tile)
        except triton.runtime.errors.OutOfResources:
            continue
        if best is None or found < best[0]:
            best = (found, tile)
    assert best is not None
    return best[1]


def sets_of(num_weights: int, sizes: Sizes) -> int:
    """Weights that are used in turns, so that none is found in the cache."""
    num_sets: int = -(-int(sizes.least_bytes) // int4_bytes(num_weights))
    return max(1, num_sets)


def tune(tokens: list[int], sizes: Sizes, device: str, time_of: Callable[..., float]) -> dict[str, object]:
    """The document for this GPU."""
    dense: dict[str, dict[str, object]] = {}
    for num_rows, num_cols in sizes.dense:
        num_sets = sets_of(num_rows * num_cols, sizes)
        tiles = [repack(*random_int4((num_rows, num_cols), device), group_size=GROUP) for _ in range(num_sets)]
        for num_tokens in (one for one in tokens if one <= MAX_KERNEL_TOKENS):
            x = torch.randn((num_tokens, num_cols), device=device).to(torch.bfloat16)
            computed = gemm_tile(num_tokens=num_tokens, num_rows=num_rows, num_cols=num_cols)

            def gemm_time(tile: GemmTile, x=x, tiles=tiles) -> float:  # type: ignore[no-untyped-def]
                return time_of(lambda i: run_gemm(x, *tiles[i % len(tiles)], group_size=GROUP, tile=tile))

            best = fastest(gemm_tiles(computed), gemm_time)
            dense.setdefault(f"{num_rows}x{num_cols}", {})[str(num_tokens)] = asdict(best)
    moe: dict[str, dict[str, object]] = {}
    for _, num_experts, num_cols, width in sizes.moe:
        layers = [
            (
                repack(*random_int4((num_experts, 2 * width, num_cols), device), group_size=GROUP),
                repack(*random_int4((num_experts, num_cols, width), device), group_size=GROUP),
            )
            for _ in range(sets_of(3 * num_experts * num_cols * width, sizes))
        ]
        for num_tokens in tokens:
            x = torch.randn((num_tokens, num_cols), device=device).to(torch.bfloat16)
            chances = torch.rand((CALLS, num_tokens, num_experts), device=device).topk(min(8, num_experts), dim=-1)
            routers = [(*one, None) for one in zip(chances.values, chances.indices, strict=True)]
            out = torch.empty_like(x)
            experts = (num_experts, width, num_cols)
            start = moe_tile(num_tokens=num_tokens, top_k=chances.indices.shape[-1], experts=experts)

            def moe_time(tile: MoeTile, x=x, out=out, routers=routers, layers=layers) -> float:  # type: ignore[no-untyped-def]
                def call(i: int) -> None:
                    gate_up, down = layers[i % len(layers)]
                    run_moe(out, x, gate_up, down, routers[i % CALLS], tile=tile, group_size=GROUP)

                return time_of(call)

            chosen = fastest(moe_tiles(start), moe_time)
            moe.setdefault("x".join(map(str, experts)), {})[str(num_tokens)] = asdict(chosen)
    gpu = torch.cuda.get_device_name() if device == "cuda" else "none"
    return {"gpu": gpu, "triton": triton.__version__, "dense": dense, "moe": moe}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU: there is nothing to tune for")
    document = tune([int(one) for one in options.tokens.split(",")], Sizes(), "cuda", graph_microseconds)
    output = options.output or file_of(torch.cuda.get_device_name())
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")
    print(output)


if __name__ == "__main__":
    main()
