"""The search of the tuner: one knob at a time from a tile to a better one, and what can be turned.

A full grid of a few shapes is some thousand kernels. This looks at the neighbours of the best tile so far, knob by
knob, until no single change gains more than the noise of a timing: some fifteen tiles for a number of tokens. The same
times give the same tile; what an earlier search found is where a later one begins.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from quantkit_kernels.tiles import LEAST_TOKENS, GemmTile, MoeTile

GAIN = 0.99  # of a time: what differs less is noise
MOST_TOKENS_UNSORTED = 8  # up to which a block for each pair of token and expert may be faster than sorting
Tile = TypeVar("Tile", GemmTile, MoeTile)
Knobs = Mapping[str, tuple[Any, ...]]


class Found(NamedTuple, Generic[Tile]):
    """The best tile, its time, that of the computed tile, and how many were timed."""

    tile: Tile
    microseconds: float
    computed: float
    num_timed: int


def gemm_knobs(computed: GemmTile) -> Knobs:
    """The most decisive first."""
    return {
        "split_k": (1, 2, 4, 8, 16),
        "block_m": _blocks(computed.block_m),
        "block_n": (64, 128),
        "num_stages": (2, 3, 4, 5),
    }


def moe_knobs(computed: MoeTile, num_tokens: int) -> Knobs:
    return {
        "is_sorted": (False, True) if num_tokens <= MOST_TOKENS_UNSORTED else (computed.is_sorted,),
        "split_k": (1, 2, 4, 8, 16),
        "block_m": _blocks(computed.block_m),
        "gate_up_n": (64, 128),
        "down_n": (64, 128),
        "num_stages": (2, 3, 4, 5),
    }


def _blocks(computed: int) -> tuple[int, ...]:
    """Half as many tokens, as computed, twice as many."""
    return tuple(size for size in (computed // 2, computed, computed * 2) if LEAST_TOKENS <= size <= 64)


def as_far_as_turned(tile: Tile, computed: Tile, knobs: Knobs) -> Tile:
    """``computed`` with the settings of another tile that its knobs have."""
    return replace(computed, **{name: getattr(tile, name) for name in knobs if getattr(tile, name) in knobs[name]})


def descend(
    starts: Sequence[Tile],
    knobs: Knobs,
    times: Callable[[Sequence[Tile]], Iterable[float]],
    is_over: Callable[[], bool],
) -> Found[Tile]:
    """The best tile that single changes lead to, or the best so far once ``is_over``.

    ``starts``: the computed tile, then those that were the fastest where it was much the same. ``times``: microseconds
    of each tile, infinite where it does not fit on the GPU.
    """
    known: dict[Tile, float] = {}

    def measure(tiles: Iterable[Tile]) -> None:
        new = [tile for tile in dict.fromkeys(tiles) if tile not in known]
        if new:
            known.update(zip(new, times(new), strict=True))

    def better(best: Tile, tiles: Sequence[Tile]) -> Tile:
        measure(tiles)
        fastest = min(tiles, key=known.__getitem__)
        return fastest if known[fastest] < GAIN * known[best] else best

    measure(starts)
    best = better(starts[0], starts)
    is_better = True
    while is_better:
        before = best
        for name, values in knobs.items():
            if is_over():
                break
            best = better(best, [replace(best, **{name: value}) for value in values])
        is_better = best != before
    assert not math.isinf(known[best]), f"no tile fits: {list(known)}"
    return Found(best, known[best], known[starts[0]], len(known))
