"""FP8 blocks, BF16 or FP32 to INT4 groups on the GPU: the bytes of the CPU path, and the error of the result.

Every sum of the search is one of integers below 2**53, so it is exact in any order; every division is the IEEE one, or
rounds as it would; no multiplication is fused with an addition. Traffic is 1 + 0.5 + 2 / group bytes a weight: 1.56 for
groups of 32, which leaves room for 10.8 instructions a weight at the bandwidth of an H200. absmax has 12 (see
absmax_jit.py), so it can reach 90 %; float32, and FP8 with several scales a group, become BF16 for it first, as the
specification rounds them. The search does about 40 operations for each weight and candidate: it is bound by those, and
still faster than the disk and the bus to the GPU.

Suffixes: ``R`` rows, ``C`` columns, ``G`` groups along C, ``B`` blocks of the FP8 scale, ``W`` packed words.
"""

from typing import Literal, NamedTuple, get_args

import torch
import triton

from quantkit_kernels.absmax_jit import absmax_kernel
from quantkit_kernels.checks import check_devices, seen
from quantkit_kernels.launch import IS_INTERPRETED, check_runs, launches
from quantkit_kernels.requantize_jit import FP8_CODES, FP8_VALUES, VALUES, error_kernel, row_kernel, search_kernel

Scales = Literal["search", "absmax"]
CANDIDATES: dict[int, tuple[float, ...]] = {
    32: (7.2, 7.8, 8.1, 8.4, 8.7),
    64: (7.2, 7.8, 8.1, 8.4, 8.7),
    128: (7.2, 7.8, 8.1, 8.4, 8.7, 12.8),
}
"""Per group size, the code that each candidate of the search gives the largest magnitude before clamping."""

MAX_IMPORTANCE = 2**16 - 1
WEIGHTS_PER_PROGRAM = 512  # registers hold them all
ABSMAX_WEIGHTS = 2048  # 32 a thread: a whole group of 32, in loads of 16 bytes
ENOUGH_PROGRAMS, MOST_ROWS = 4096, 16  # what fills a GPU; what a program takes one after the other
ERROR_GROUPS = 128  # groups of one program: one for each thread
OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}
ABSMAX_OPTIONS = {"enable_fp_fusion": False, "num_warps": 2}


class Int4(NamedTuple):
    """``packed`` int32 [R, C / 8], eight codes plus 8 a word, the first in the lowest bits; ``scale`` BF16 [R, G]."""

    packed: torch.Tensor
    scale: torch.Tensor


class RowErrors(NamedTuple):
    """Per row, float64 [R]: the sums of squared error and of squared weight, added in the order of the CPU path."""

    error2: torch.Tensor
    weight2: torch.Tensor


class Source(NamedTuple):
    """Weights as they are stored, [R, C] and contiguous: BF16, float32, or FP8 codes with ``scale`` float32 [blocks].

    ``row_offset``: row 0 of the weight is this row of the grid of blocks.
    """

    array: torch.Tensor
    scale: torch.Tensor | None = None
    block: tuple[int, int] = (128, 128)
    row_offset: int = 0


def requantize_fp8_to_int4(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    *,
    group_size: int,
    scales: Scales,
    signed: bool,
    importance: torch.Tensor | None = None,
    block: tuple[int, int] = (128, 128),
) -> Int4:
    """INT4 groups of ``codes`` [R, C] (float8_e4m3fn, no NaN) times ``scale_inv`` [ceil(R / 128), ceil(C / 128)].

    ``scales``: ``absmax`` is what compressed-tensors 0.19 computes, ``search`` looks for the best scale of each group;
    ``signed`` lets it be negative. ``importance``: second moments [C] of the input channels, finite and not negative,
    in any unit; the search weighs squared errors with them. Raises ValueError for shapes and dtypes that do not go
    together. Preconditions, since looking would wait for the GPU: no NaN, ``scale_inv`` finite and not negative, and
    code times scale below 3.39e38, where BF16 ends. quantkit refuses sources that break them.
    """
    source = Source(codes, scale_inv.float(), block)
    if importance is None:
        return quantize(source, group_size=group_size, scales=scales, signed=signed)
    if not importance.is_floating_point():
        raise ValueError(f"importance is second moments as floats, not {importance.dtype}")
    if group_size not in CANDIDATES or importance.shape != codes.shape[1:] or len(importance) % group_size:
        raise ValueError(f"importance {tuple(importance.shape)} does not go with {tuple(codes.shape)} in {group_size}")
    levels = importance_levels(importance, group_size=group_size)
    return quantize(source, group_size=group_size, scales=scales, signed=signed, levels=levels)


def importance_levels(moments: torch.Tensor, *, group_size: int) -> torch.Tensor:
    """Second moments [C] in steps of 1/65,535 of their group's largest, at least one; 0 where all of a group are 0."""
    grouped = moments.double().reshape(-1, group_size)
    largest = grouped.amax(dim=1, keepdim=True)
    steps = (grouped / torch.where(largest > 0, largest, 1.0) * MAX_IMPORTANCE).round().clamp_min(1)
    return torch.where(largest > 0, steps, 0.0).to(torch.int32).reshape(-1)


@launches
def quantize(
    source: Source, *, group_size: int, scales: Scales, signed: bool, levels: torch.Tensor | None = None
) -> Int4:
    """INT4 groups of any source; ``levels`` int32 [C]: importance, 0 where it is not known.

    Raises ValueError for shapes and dtypes that do not go together.
    """
    _check(source, group_size)
    if scales not in get_args(Scales):
        raise ValueError(f"scales is {scales!r}, not one of {', '.join(get_args(Scales))}")
    if levels is not None and scales != "search":
        raise ValueError(f"importance is for the search: {scales} has no use for it")
    if levels is not None and (levels.dtype != torch.int32 or not levels.is_contiguous()):
        raise ValueError(f"levels of importance are contiguous int32, not {seen(levels)}")
    if levels is not None and (levels.shape != source.array.shape[1:] or levels.device != source.array.device):
        raise ValueError(f"importance is [{source.array.shape[1]}] on {source.array.device}, not {levels.shape}")
    check_runs(source.array)
    num_rows, num_cols = source.array.shape
    device = source.array.device
    packed = torch.empty((num_rows, num_cols // 8), dtype=torch.int32, device=device)
    scale = torch.empty((num_rows, num_cols // group_size), dtype=torch.int16, device=device)
    if scale.numel() and scales == "absmax":
        _quantize_words(_in_words(source, group_size), packed, scale, group_size=group_size)
    elif scale.numel():
        block_groups = WEIGHTS_PER_PROGRAM // group_size
        search_kernel[(triton.cdiv(scale.numel(), block_groups),)](
            *_source_arguments(source, group_size, as_codes=True),
            packed if levels is None else levels,
            packed,
            scale,
            scale.numel(),
            GROUP=group_size,
            BLOCK_G=block_groups,
            CANDIDATES=CANDIDATES[group_size],
            SIGNED=signed,
            HAS_IMPORTANCE=levels is not None,
            **OPTIONS,
        )
    return Int4(packed, scale.view(torch.bfloat16))


def _in_words(source: Source, group_size: int) -> Source:
    """What can be read in words of 64 bits, a group at a time: FP8 with one scale a group, else the weight in BF16."""
    array = source.array
    if source.scale is not None and source.block[1] % group_size:
        row, column = (
            (torch.arange(size, device=array.device) + offset) // step
            for size, offset, step in zip(array.shape, (source.row_offset, 0), source.block, strict=True)
        )
        values = array.view(torch.float8_e4m3fn).float() * source.scale[row][:, column]
        return Source(values.to(torch.bfloat16))
    if array.dtype == torch.float32:
        return Source(array.to(torch.bfloat16))
    # a view in words asks this of the offset too
    is_aligned = array.data_ptr() % 8 == 0 and array.storage_offset() * array.itemsize % 8 == 0
    return source if is_aligned else source._replace(array=array.clone())


def _quantize_words(source: Source, packed: torch.Tensor, scale: torch.Tensor, *, group_size: int) -> None:
    num_rows, num_cols = source.array.shape
    tile_groups = ABSMAX_WEIGHTS // group_size
    num_tiles = triton.cdiv(num_cols // group_size, tile_groups)
    rows_per_program = min(max(num_rows * num_tiles // ENOUGH_PROGRAMS, 1), MOST_ROWS)
    blocks = source.array if source.scale is None else source.scale
    absmax_kernel[(triton.cdiv(num_rows, rows_per_program) * num_tiles,)](
        source.array.view(torch.int64),
        blocks,
        packed,
        scale,
        num_rows,
        num_cols,
        source.row_offset,
        rows_per_program,
        blocks.shape[1],
        IS_FP8=source.scale is not None,
        BLOCK_ROWS=source.block[0],
        BLOCK_COLS=source.block[1],
        GROUP=group_size,
        TILE_G=tile_groups,
        INTERPRET=IS_INTERPRETED,
        **ABSMAX_OPTIONS,
    )


@launches
def row_errors(source: Source, int4: Int4, *, group_size: int) -> RowErrors:
    """The error of INT4 groups against their source; deterministic, one addition after the other."""
    _check(source, group_size)
    num_rows, num_cols = source.array.shape
    num_groups = num_rows * (num_cols // group_size)
    sums = torch.empty((2, max(num_groups, 1)), dtype=torch.float64, device=source.array.device)
    rows = torch.zeros((2, num_rows), dtype=torch.float64, device=source.array.device)
    if num_groups:
        error_kernel[(triton.cdiv(num_groups, ERROR_GROUPS),)](
            *_source_arguments(source, group_size, as_codes=False),
            int4.packed,
            int4.scale.view(torch.int16),
            sums,
            num_groups,
            GROUP=group_size,
            BLOCK_G=ERROR_GROUPS,
            **OPTIONS,
        )
        grid = (triton.cdiv(num_rows, ERROR_GROUPS),)
        row_kernel[grid](sums, rows, num_rows, num_cols // group_size, num_groups, BLOCK_R=ERROR_GROUPS, **OPTIONS)
    return RowErrors(rows[0], rows[1])


def _source_arguments(source: Source, group_size: int, *, as_codes: bool) -> tuple[object, ...]:
    """Pointers, geometry and kind, as the kernels take them; ``as_codes``: FP8 as integers if a group has one scale."""
    num_cols = source.array.shape[1]
    if source.scale is None:
        return source.array, source.array, num_cols, 0, 1, 1, 1, VALUES, 1
    block_rows, block_cols = source.block
    has_one_scale = block_cols % group_size == 0
    kind = FP8_CODES if has_one_scale and as_codes else FP8_VALUES
    geometry = (num_cols, source.row_offset, block_rows, block_cols, source.scale.shape[1])
    return source.array.view(torch.uint8), source.scale, *geometry, kind, group_size if has_one_scale else 1


def _check(source: Source, group_size: int) -> None:
    array, scale = source.array, source.scale
    if group_size not in CANDIDATES:
        raise ValueError(f"group_size is {group_size}, not one of {', '.join(map(str, CANDIDATES))}")
    if array.ndim != 2 or not array.is_contiguous():
        raise ValueError(f"the weight must be a contiguous matrix, not {seen(array)}")
    num_rows, num_cols = array.shape
    if num_cols % group_size:
        raise ValueError(f"{num_cols} columns are no multiple of the group size {group_size}")
    if scale is None:
        if array.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"a weight without a scale is BF16 or float32, not {array.dtype}")
        return
    if array.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise ValueError(f"codes are float8_e4m3fn (or its bytes as uint8), not {array.dtype}")
    if len(source.block) != 2 or min(source.block) < 1:
        raise ValueError(f"block is {source.block}, not rows and columns from 1 on")
    check_devices(codes=array, scale_inv=scale)
    needed = (-(-(source.row_offset + num_rows) // source.block[0]), -(-num_cols // source.block[1]))
    if scale.dtype != torch.float32 or scale.ndim != 2 or not scale.is_contiguous():
        raise ValueError(f"the scale must be a contiguous float32 matrix, not {seen(scale)}")
    if scale.shape[0] < needed[0] or scale.shape[1] != needed[1]:
        raise ValueError(
            f"{tuple(array.shape)} in blocks of {source.block} has a scale {needed}, not {tuple(scale.shape)}"
        )
