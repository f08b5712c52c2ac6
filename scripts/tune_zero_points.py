#!/usr/bin/env python
"""The candidates of the search with zero points: what they give, and which lists would give more.

Weights of several distributions become FP8 in blocks of 128 x 128, then INT4. Two errors: the relative error of the
weights, and the mean over the groups of what the search makes small, both as root mean squares. Weights that are
shifted have a mean of their own in each group, of half a standard deviation.

Suffixes: ``R`` rows, ``C`` columns, ``G`` groups, ``S`` group size, ``L`` candidates.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from quantkit.numerics import fused_cpu, fused_zero_points, search, zero_points
from quantkit.numerics.fp8 import E4M3_INTS, dequantize
from quantkit.numerics.packing import unpack_int4
from quantkit.numerics.scale_choice import ScaleChoice

Source = tuple[NDArray[np.uint8], NDArray[np.float32]]
Errors = tuple[float, NDArray[np.float64]]  # squared, relative; weighed, of each group
Float = NDArray[np.float64]

SHAPE = (512, 2048)
BLOCK = (128, 128)
SEED = 5
NUM_CANDIDATES = (2, 3, 4, 5, 6, 7)
EQUAL = np.full(SHAPE[1], search.MAX_IMPORTANCE, np.uint16)  # the plain squared error
STEPS = tuple(round(11.8 + 0.2 * k, 1) for k in range(45))


def distributions(group_size: int) -> dict[str, NDArray[np.float64]]:
    rng = np.random.default_rng(SEED)
    means_RC = rng.standard_normal((SHAPE[0], SHAPE[1] // group_size)).repeat(group_size, 1)
    return {
        "normal": rng.standard_normal(SHAPE),
        "Laplace": rng.laplace(size=SHAPE),
        "Student t, 5": rng.standard_t(5, SHAPE),
        "Student t, 3": rng.standard_t(3, SHAPE),
        "normal, shifted": rng.standard_normal(SHAPE) + means_RC / 2,
    }


def fp8(weight_RC: NDArray[np.float64]) -> Source:
    """Codes and scales of 128 x 128 blocks."""
    blocks = torch.from_numpy(weight_RC).float().reshape(SHAPE[0] // 128, 128, SHAPE[1] // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).reshape(SHAPE).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).numpy(), scale.numpy()


def errors(source: Source, levels_RC: NDArray[np.int64], scale_RG: NDArray[np.uint16]) -> Errors:
    wide_RG = (scale_RG.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    shape = (*scale_RG.shape, -1)
    values_RGS = dequantize(*source, block=BLOCK).astype(np.float64).reshape(shape)
    error2_RGS = (values_RGS - levels_RC.reshape(shape) * wide_RG[..., None]) ** 2
    weight_RGS = search.element_weights(E4M3_INTS[source[0]].astype(np.int64).reshape(shape), None)
    weighed_RG = (weight_RGS * error2_RGS).sum(-1) / (weight_RGS * values_RGS**2).sum(-1)
    return float(error2_RGS.sum() / (values_RGS**2).sum()), weighed_RG.reshape(-1)


def symmetric(source: Source, group_size: int, signed: bool) -> Errors:
    packed_RW, scale_RG = fused_cpu.quantize_fp8(
        *source, block=BLOCK, group_size=group_size, scales="search", signed=signed
    )
    return errors(source, unpack_int4(packed_RW, SHAPE[1]).astype(np.int64), scale_RG)


def spanning(
    source: Source, group_size: int, spans: tuple[float, ...] | None, importance_C: NDArray[np.uint16] | None = None
) -> Errors:
    """``spans``: None for the smallest and the largest value, as compressed-tensors."""
    scales: ScaleChoice = "absmax" if spans is None else "search"
    with patch.dict(zero_points.SPANS, {group_size: spans or (15.0,)}):
        packed_RW, scale_RG, zero_RG = fused_zero_points.quantize_fp8(
            *source, block=BLOCK, group_size=group_size, scales=scales, importance_C=importance_C
        )
    codes_RC = unpack_int4(packed_RW, SHAPE[1]).astype(np.int64)
    return errors(source, codes_RC - zero_RG.repeat(group_size, 1), scale_RG)


def show_figures() -> None:
    methods: dict[str, Callable[[Source, int], Errors]] = {
        "min and max": lambda source, size: spanning(source, size, None),
        "positive search": lambda source, size: symmetric(source, size, False),
        "signed search": lambda source, size: symmetric(source, size, True),
        "span of 15": lambda source, size: spanning(source, size, (15.0,)),
        "candidates": lambda source, size: spanning(source, size, zero_points.SPANS[size]),
        "all of equal weight": lambda source, size: spanning(source, size, zero_points.SPANS[size], EQUAL),
        f"{len(STEPS)} candidates": lambda source, size: spanning(source, size, STEPS),
    }
    print("| group | weights | " + " | ".join(methods) + " |")
    print("|---|---|" + "---|" * len(methods))
    for group_size in zero_points.SPANS:
        for name, weight_RC in distributions(group_size).items():
            source = fp8(weight_RC)
            cells = []
            for method in methods.values():
                relative, weighed_G = method(source, group_size)
                cells.append(f"{relative**0.5:.4f} ({weighed_G.mean() ** 0.5:.4f})")
            print(f"| {group_size} | {name} | " + " | ".join(cells) + " |", flush=True)


def best_list(errors_GL: Float, num_candidates: int) -> tuple[list[int], float]:
    """Add the best candidate until there are enough, then exchange one at a time while that helps."""
    chosen: list[int] = []
    while len(chosen) < num_candidates:
        rest_G = errors_GL[:, chosen].min(1, initial=np.inf)
        chosen.append(int(np.minimum(rest_G[:, None], errors_GL).mean(0).argmin()))
    best = float(errors_GL[:, chosen].min(1).mean())
    is_better = True
    while is_better:
        is_better = False
        for k in range(num_candidates):
            rest_G = errors_GL[:, chosen[:k] + chosen[k + 1 :]].min(1, initial=np.inf)
            means_L = np.minimum(rest_G[:, None], errors_GL).mean(0)
            if means_L.min() < best * (1 - 1e-7):
                chosen[k], best, is_better = int(means_L.argmin()), float(means_L.min()), True
    return sorted(chosen), best


def show_lists() -> None:
    """Per group size and length, the best list, and its error as a multiple of that of all candidates together."""
    for group_size in zero_points.SPANS:
        parts = []
        for weight_RC in distributions(group_size).values():
            source = fp8(weight_RC)
            errors_GL = np.stack([spanning(source, group_size, (steps,))[1] for steps in STEPS], 1)
            parts.append(errors_GL / errors_GL.min(1).mean())
        errors_GL = np.concatenate(parts)
        for num_candidates in NUM_CANDIDATES:
            chosen, best = best_list(errors_GL, num_candidates)
            print(group_size, [STEPS[k] for k in chosen], f"{best**0.5:.4f}", flush=True)
        given = [int(np.argmin(np.abs(np.array(STEPS) - steps))) for steps in zero_points.SPANS[group_size]]
        print(group_size, "given", f"{float(errors_GL[:, given].min(1).mean()) ** 0.5:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lists", action="store_true", help="look for lists of candidates; some minutes")
    show_lists() if parser.parse_args().lists else show_figures()
