"""Which arguments of fp8_kv.py go together, and a cache as rows."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from quantkit_kernels.fp8_kv_jit import BF16, DSA, FLAT
from quantkit_kernels.kv_layout import SCALE_COLS, check_scale

ScaleRule = Literal["sglang", "vllm"]

KERNEL_LAYOUTS = {"flat576": FLAT.value, "dsa656": DSA.value, "bf16": BF16.value}
INDEX_ROW = SCALE_COLS + 4
_INPUTS = (torch.bfloat16, torch.float16)
_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
_SCALE_RULES = ("sglang", "vllm")


def check_rule(scale_rule: str) -> None:
    if scale_rule not in _SCALE_RULES:
        raise ValueError(f"scale_rule is {scale_rule!r}, not one of {', '.join(_SCALE_RULES)}")


def check_input(name: str, part: Tensor, num_dims: int, slots: Tensor) -> None:
    """Rows may have gaps between them, but none within."""
    if part.dtype not in _INPUTS:
        raise ValueError(f"{name} is BF16 or FP16, not {part.dtype}")
    if part.ndim != num_dims or part.numel() == 0 < len(slots):
        raise ValueError(f"{name} must have {num_dims} dimensions and columns, not {tuple(part.shape)}")
    if len(part) != len(slots) or part.device != slots.device:
        raise ValueError(f"{name} has {len(part)} rows on {part.device}, slots {len(slots)} on {slots.device}")
    if len(part) and not part[0].is_contiguous():
        raise ValueError(f"the rows of {name} must be contiguous, not of strides {part.stride()}")


def check_slots(slots: Tensor) -> None:
    if slots.dtype not in (torch.int32, torch.int64) or slots.ndim != 1 or not slots.is_contiguous():
        raise ValueError(f"slots must be a contiguous int32 or int64 vector, not {slots.dtype} {tuple(slots.shape)}")


def as_bytes(cache: Tensor) -> Tensor:
    """E4M3 as uint8; anything else as it is, for others to refuse."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def rows_of(name: str, cache: Tensor, row: int, slots: Tensor) -> Tensor:
    """The cache as [slots, row], on the device of ``slots``."""
    if cache.dtype != torch.uint8:
        raise ValueError(f"{name} is uint8, not {cache.dtype}: view it as that")
    if not cache.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not of strides {cache.stride()}")
    if cache.device != slots.device:
        raise ValueError(f"{name} is on {cache.device}, slots on {slots.device}")
    if row < 1:
        raise ValueError(f"{name} has no columns: {tuple(cache.shape)}")
    return cache.view(-1, row)


def mla_rows(cache: Tensor, row: int, slots: Tensor) -> Tensor:
    if cache.ndim < 2 or cache.shape[-1] != row:
        raise ValueError(f"the cache must be [..., {row}] bytes, not {tuple(cache.shape)}")
    return _aligned(rows_of("cache", cache, row, slots))


def index_rows(cache: Tensor, slots: Tensor) -> Tensor:
    if cache.ndim != 3 or cache.shape[-1] != INDEX_ROW or cache.shape[1] == 0:
        raise ValueError(f"the cache must be [pages, page size, {INDEX_ROW}] bytes, not {tuple(cache.shape)}")
    return _aligned(rows_of("cache", cache, INDEX_ROW, slots))


def _aligned(rows: Tensor) -> Tensor:
    if rows.data_ptr() % 4:
        raise ValueError("the cache must begin at a multiple of 4 bytes: it holds float32 scales")
    return rows


def check_same_slots(rows: Sequence[Tensor]) -> None:
    if len(rows[0]) != len(rows[1]):
        raise ValueError(f"key_cache has {len(rows[0])} slots, value_cache {len(rows[1])}")


def factor_of(name: str, scale: float) -> tuple[float, bool]:
    """What the kernel takes for a scale: the reciprocal of a power of two, which is exact, or a scale to divide by."""
    single = check_scale(name, scale)
    is_power = math.frexp(single)[0] == 0.5
    return (1.0 / single if is_power else single), is_power


def empty_output(shape: tuple[int, ...], dtype: torch.dtype, cache: Tensor) -> Tensor:
    if dtype not in _OUTPUTS:
        raise ValueError(f"dtype is BF16, FP16 or float32, not {dtype}")
    return torch.empty(shape, dtype=dtype, device=cache.device)
