#!/usr/bin/env python
"""Measures which tiles are fastest on this GPU and writes them where the kernels look for them.

For the shapes of GLM-5.2 and Kimi-K2 on eight GPUs and each number of tokens tiles are timed as bench_kernels.py does,
from the computed one on (tune_search.py). Each is written when it is found, so that nothing is lost, and a later call
goes on: what the file has not comes first, what it has is searched again from there. Commit the file with the figures
of bench_kernels.py beside it. Nothing is ever tuned in a request.

    scripts/tune_kernels.py [--budget 540] [--only moe,16384x8192x32] [--tokens 1,2,4] [-o FILE]

``--tokens`` from 1 on: a tile holds for fewer tokens too, where a table has none for these.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))  # so that it runs from anywhere
sys.path.insert(0, str(Path(__file__).parent))
from bench_cases import GROUP, Sizes, int4_bytes, random_int4
from bench_kernels import CALLS, graph_microseconds, numbers
from tune_search import Knobs, as_far_as_turned, descend, gemm_knobs, moe_knobs

from quantkit_kernels import repack
from quantkit_kernels.gemm import MAX_KERNEL_TOKENS, run_gemm
from quantkit_kernels.moe import Router, run_moe
from quantkit_kernels.tiles import DenseShape, GemmTile, MoeShape, MoeTile, gemm_tile, moe_tile
from quantkit_kernels.tuned import Gpu, file_of, gpu_of

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
Document = dict[str, Any]  # that of tuned.py
Call = Callable[[int], object]


@dataclass(frozen=True)
class Shape:
    """What a table of tiles names: a ``dense`` weight, or experts (``moe``)."""

    kind: str
    sizes: DenseShape | MoeShape

    @property
    def name(self) -> str:
        return "x".join(map(str, self.sizes))


@dataclass(frozen=True)
class Work:
    """A number of tokens for a shape; ``call_of`` a tile is what is timed."""

    num_tokens: int
    computed: Any
    knobs: Knobs
    call_of: Callable[[Any], Call]


def shapes_of(sizes: Sizes) -> list[Shape]:
    dense = (DenseShape(num_rows, num_cols, GROUP) for num_rows, num_cols in sizes.dense)
    experts = (MoeShape(number, width, cols, GROUP, min(8, number)) for _, number, cols, width in sizes.moe)
    return [*(Shape("dense", one) for one in dense), *(Shape("moe", one) for one in experts)]


def without_table(device: str) -> Gpu:
    """This GPU without its table: what is computed for it."""
    return gpu_of(torch.device(device))._replace(name="")


def sets_of(num_weights: int, sizes: Sizes) -> int:
    """Weights that are used in turns, so that none is found in the cache."""
    num_sets: int = -(-int(sizes.least_bytes) // int4_bytes(num_weights))
    return max(1, num_sets)


def dense_work(shape: DenseShape, tokens: list[int], sizes: Sizes, device: str) -> Iterator[Work]:
    num_rows, num_cols, _ = shape
    num_sets = sets_of(num_rows * num_cols, sizes)
    weights = [repack(*random_int4((num_rows, num_cols), device), group_size=GROUP) for _ in range(num_sets)]
    for num_tokens in (one for one in tokens if one <= MAX_KERNEL_TOKENS):
        x = torch.randn((num_tokens, num_cols), device=device).to(torch.bfloat16)
        computed = gemm_tile(shape, num_tokens=num_tokens, gpu=without_table(device))

        def call_of(tile: GemmTile, x: torch.Tensor = x) -> Call:
            return lambda i: run_gemm(x, weights[i % num_sets], group_size=GROUP, tile=tile)

        yield Work(num_tokens, computed, gemm_knobs(computed), call_of)


def moe_work(shape: MoeShape, tokens: list[int], sizes: Sizes, device: str) -> Iterator[Work]:
    num_experts, width, num_cols, _, top_k = shape
    layers = [
        (
            repack(*random_int4((num_experts, 2 * width, num_cols), device), group_size=GROUP),
            repack(*random_int4((num_experts, num_cols, width), device), group_size=GROUP),
        )
        for _ in range(sets_of(3 * num_experts * num_cols * width, sizes))
    ]
    for num_tokens in tokens:
        x = torch.randn((num_tokens, num_cols), device=device).to(torch.bfloat16)
        chances = torch.rand((CALLS, num_tokens, num_experts), device=device).topk(top_k, dim=-1)
        routers = [Router(*one) for one in zip(chances.values, chances.indices, strict=True)]
        computed = moe_tile(shape, num_tokens=num_tokens, gpu=without_table(device))

        def call_of(tile: MoeTile, x: torch.Tensor = x, routers: Any = routers) -> Call:
            return lambda i: run_moe(x, *layers[i % len(layers)], routers[i % CALLS], tile=tile, group_size=GROUP)

        yield Work(num_tokens, computed, moe_knobs(computed, num_tokens), call_of)


def gpu_times(calls: Sequence[Call], executor: Executor) -> Iterator[float]:
    """Microseconds of each, compiled side by side first; infinite where the GPU has no room for it."""

    def fits(call: Call) -> bool:
        try:
            call(0)
        except triton.runtime.errors.OutOfResources:
            return False
        return True

    for call, is_fit in zip(calls, list(executor.map(fits, calls)), strict=True):
        yield graph_microseconds(call) if is_fit else math.inf


def works_of(
    document: Document, shapes: list[Shape], tokens: list[int], sizes: Sizes, device: str
) -> Iterator[tuple[Shape, Work]]:
    """What the document has not, then what it has; of a shape from few tokens to many."""
    known = {(shape, one) for shape in shapes for one in tokens if str(one) in document[shape.kind].get(shape.name, {})}
    for is_known in (False, True):
        for shape in shapes:
            chosen = sorted(one for one in tokens if ((shape, one) in known) == is_known)
            if not chosen:
                continue
            if isinstance(shape.sizes, DenseShape):
                works = dense_work(shape.sizes, chosen, sizes, device)
            else:
                works = moe_work(shape.sizes, chosen, sizes, device)
            yield from ((shape, work) for work in works)


def tune(
    document: Document,
    works: Iterable[tuple[Shape, Work]],
    times: Callable[[Sequence[Call]], Iterable[float]],
    is_over: Callable[[], bool],
) -> Iterator[str]:
    """Fill ``document`` until ``is_over``; a line for each tile once it is in there.

    Starts: the computed tile, the one that the document has, and what was just found for fewer tokens.
    """
    last: dict[Shape, Any] = {}
    for shape, work in works:
        if is_over():
            return
        tiles = document[shape.kind].setdefault(shape.name, {})
        computed, knobs = work.computed, work.knobs
        starts = [computed]
        if str(work.num_tokens) in tiles:
            starts.append(replace(computed, **tiles[str(work.num_tokens)]))
        if shape in last:
            starts.append(as_far_as_turned(last[shape], computed, knobs))

        def times_of(tiles: Sequence[Any], call_of: Callable[[Any], Call] = work.call_of) -> Iterable[float]:
            return times([call_of(tile) for tile in tiles])

        found = descend(starts, knobs, times_of, is_over)
        last[shape] = found.tile
        tiles[str(work.num_tokens)] = asdict(found.tile)
        yield (
            f"{shape.kind} {shape.name}, M {work.num_tokens}: {found.microseconds:.1f} us, computed "
            f"{found.computed:.1f}; {found.num_timed} tiles timed"
        )


def document_of(path: Path, gpu: str) -> Document:
    """What is there for this GPU and Triton, or one without tiles."""
    if path.is_file():
        document: Document = json.loads(path.read_text())
        if document["gpu"] == gpu and document["triton"].split(".")[:2] == triton.__version__.split(".")[:2]:
            return document
    return {"gpu": gpu, "triton": triton.__version__, "dense": {}, "moe": {}}


def write(document: Document, path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    half = path.with_suffix(".part")
    half.write_text(json.dumps(document, indent=1) + "\n")
    half.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds, after which no other tile is timed")
    parser.add_argument("--only", help="kinds and shapes, with commas")
    parser.add_argument("--tokens", type=numbers, default=list(TOKENS), help="numbers, with commas")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    end = time.monotonic() + options.budget
    sizes = Sizes()
    shapes = shapes_of(sizes)
    if options.only:
        names = set(options.only.split(","))
        known = {name for shape in shapes for name in (shape.kind, shape.name)}
        if not names <= known:
            parser.error(f"--only takes of {', '.join(sorted(known))}, not {', '.join(sorted(names - known))}")
        shapes = [shape for shape in shapes if names & {shape.kind, shape.name}]
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU: there is nothing to tune for")
    gpu = torch.cuda.get_device_name()
    output = options.output or file_of(gpu)
    document = document_of(output, gpu)
    works = works_of(document, shapes, options.tokens, sizes, "cuda")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as executor:
        times = partial(gpu_times, executor=executor)
        for line in tune(document, works, times, lambda: time.monotonic() > end):
            write(document, output)
            print(line, flush=True)
    print(output)


if __name__ == "__main__":
    main()
