"""How many programs share a sequence, and what joins their results: the host's part of both decode kernels."""

from functools import cache
from typing import Any

import torch
import triton

from quantkit_kernels.attention_jit import merge_splits_kernel
from quantkit_kernels.checks import seen
from quantkit_kernels.tiles import AttentionTile
from quantkit_kernels.tuned import gpu_of

LOG2_E = 1.4426950408889634
MAX_SPLITS = 256
SPLIT_COST = 2  # what a program costs beside its blocks, in blocks: its start, and its part of the merge
MERGE_SPLITS, MERGE_COLUMNS = 16, 128  # a tile of the merge kernel


@cache
def plan_splits(num_programs: int, num_blocks: int, num_slots: int) -> int:
    """Splits of each sequence with the least work on the busiest SM, the fewest of those.

    ``num_programs`` is that of one split, ``num_blocks`` of the longest possible sequence, ``num_slots`` what the GPU
    runs at once. Depends on shapes alone, so that a CUDA graph and two runs have the same.
    """

    def cost(num_splits: int) -> int:
        waves = -(-num_programs * num_splits // num_slots)
        return waves * (-(-num_blocks // num_splits) + SPLIT_COST)

    return min(range(1, max(min(num_blocks, MAX_SPLITS), 1) + 1), key=cost)


def num_slots(device: torch.device, tile: AttentionTile) -> int:
    return gpu_of(device).num_sms * tile.per_sm


class Parts:
    """Outputs of a launch: the final ones for one split, else float32 results of the splits, and their merge."""

    def __init__(self, shape: tuple[int, int, int], num_splits: int, device: torch.device) -> None:
        num_seqs, num_heads, width = shape
        self.num_splits = num_splits
        self.out = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self.lse = torch.empty((num_seqs, num_heads), dtype=torch.float32, device=device)
        self.part_out, self.part_lse = self.out, self.lse
        if num_splits > 1:
            parts = (num_seqs, num_heads, num_splits)
            self.part_out = torch.empty((*parts, width), dtype=torch.float32, device=device)
            self.part_lse = torch.empty(parts, dtype=torch.float32, device=device)

    def merge(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole output and its lse, a natural logarithm."""
        if self.num_splits > 1 and self.out.numel():
            width = self.out.shape[-1]
            merge_splits_kernel[(self.lse.numel(), triton.cdiv(width, MERGE_COLUMNS))](
                self.part_out,
                self.part_lse,
                self.out,
                self.lse,
                self.num_splits,
                WIDTH=width,
                BLOCK_S=MERGE_SPLITS,
                BLOCK_C=MERGE_COLUMNS,
                num_warps=4,
            )
        return self.out, self.lse


def check_sequences(q: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, num_splits: int | None) -> None:
    """Raises ValueError for what no decode kernel takes."""
    if q.ndim != 3 or q.dtype != torch.bfloat16 or not q.is_contiguous():
        raise ValueError(f"q must be contiguous BF16 [B, H, D], not {seen(q)}")
    named: dict[str, tuple[torch.Tensor, Any]] = {
        "page_table": (page_table, (q.shape[0], page_table.shape[-1] if page_table.ndim else 0)),
        "seq_lens": (seq_lens, (q.shape[0],)),
    }
    for name, (tensor, shape) in named.items():
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32 {shape}, not {seen(tensor)}")
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits is {num_splits}, not a number from 1 on")


def check_alignment(**tensors: torch.Tensor) -> None:
    """Raises ValueError for what a kernel would have to load byte by byte."""
    for name, tensor in tensors.items():
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} must begin at a multiple of 16 bytes")


def is_power_of_two(number: int, *, least: int) -> bool:
    return number >= least and number & (number - 1) == 0
