"""What a module takes of a checkpoint, and gives: the parts of a weight, checked. A wrong one is a ValueError."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from quantkit_kernels.word_order import Int4Weight, check_group_size, check_weight, repack, unrepack

PARTS = ("weight_packed", "weight_scale", "weight_shape")
Device = torch.device | str | int | None


def check_sizes(group_size: int, *, columns: Mapping[str, int], others: Mapping[str, int]) -> None:
    """``columns`` are whole groups; no size is below one."""
    check_group_size(group_size)
    for name, size in {**columns, **others}.items():
        if size < 1:
            raise ValueError(f"{name} is {size}, not at least 1")
    for name, size in columns.items():
        if size % group_size:
            raise ValueError(f"{name} is {size}: no whole groups of {group_size}")


def check_bias(bias: Tensor, num_rows: int) -> None:
    is_float = bias.dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    if tuple(bias.shape) != (num_rows,) or not is_float:
        raise ValueError(f"the bias is floats [{num_rows}], not {bias.dtype} {tuple(bias.shape)}")


def check_taken(tensors: Mapping[str, Tensor | None], names: Collection[str], optional: Collection[str] = ()) -> None:
    """Every name is there, and nothing beside them: zero points, an order of columns."""
    for name in names:
        if not isinstance(tensors.get(name), Tensor):
            raise ValueError(f"{name} is missing")
    for name in sorted(set(tensors) - {*names, *optional}):
        raise ValueError(f"nothing here takes {name}")


def repacked(tensors: Mapping[str, Tensor], shape: tuple[int, int], *, group_size: int, device: Device) -> Int4Weight:
    """The parts of a weight in the kernels' order, on a device."""
    packed, scale, stored = (tensors[part] for part in PARTS)
    if any(one.is_meta for one in (packed, scale, stored)):
        raise ValueError("tensors on meta hold nothing to load")
    if tuple(stored.flatten().tolist()) != shape or stored.ndim != 1 or packed.ndim != 2:
        raise ValueError(f"a weight {shape} is stored as words {tuple(packed.shape)} of {stored.tolist()}")
    check_weight(Int4Weight(packed, scale), num_rows=shape[0], num_cols=shape[1], group_size=group_size)
    return repack(packed.to(device), scale.to(device), group_size=group_size)


def stored_parts(tiles: Int4Weight, num_cols: int, group_size: int) -> dict[str, Tensor]:
    """The inverse of ``repacked``."""
    packed, scale = unrepack(tiles, num_cols=num_cols, group_size=group_size)
    return dict(zip(PARTS, (packed, scale, torch.tensor([len(packed), num_cols], dtype=torch.int64)), strict=True))
