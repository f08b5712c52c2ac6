"""Checkpoints in GPTQ's and AWQ's layouts, written by the definition of their words: nothing of ours writes them."""

from typing import Any

import torch

from tests.tiny import TinyCheckpoint

AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # row of its eight that nibble 0, 1, ... of a word holds


def words(nibbles: torch.Tensor) -> torch.Tensor:
    """Int32 of eight nibbles along the last dimension, the first lowest."""
    shifts = torch.arange(0, 32, 4)
    return (nibbles.long() << shifts).sum(-1).to(torch.int64).apply_(lambda word: word - 2**32 * (word >= 2**31)).int()


def gptq_tensors(unsigned_RC: torch.Tensor, scale_RG: torch.Tensor, zero_RG: torch.Tensor, less: int) -> dict[str, Any]:
    """``unsigned_RC``: nibbles; ``zero_RG``: unsigned zero points, stored ``less`` so much."""
    rows, cols = unsigned_RC.shape
    groups = scale_RG.shape[1]
    return {
        "qweight": words(unsigned_RC.T.reshape(cols // 8, 8, rows).transpose(1, 2)),
        "scales": scale_RG.T.contiguous(),
        "qzeros": words((zero_RG.T - less).reshape(groups, rows // 8, 8)),
        "g_idx": (torch.arange(cols) // (cols // groups)).int(),
    }


def awq_tensors(unsigned_RC: torch.Tensor, scale_RG: torch.Tensor, zero_RG: torch.Tensor) -> dict[str, Any]:
    """The same for AutoAWQ's `gemm`."""
    rows, cols = unsigned_RC.shape
    groups = scale_RG.shape[1]
    return {
        "qweight": words(unsigned_RC.T.reshape(cols, rows // 8, 8)[..., AWQ_ROWS]),
        "scales": scale_RG.T.contiguous(),
        "qzeros": words(zero_RG.T.reshape(groups, rows // 8, 8)[..., AWQ_ROWS]),
    }


def section_of(layout: str, *, group_size: int, symmetric: bool) -> dict[str, Any]:
    """quantization_config as the tools write it."""
    if layout == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group_size,
            "zero_point": not symmetric,
            "version": "gemm",
        }
    section: dict[str, Any] = {"bits": 4, "group_size": group_size, "sym": symmetric, "desc_act": False}
    if layout.startswith("auto_round:"):
        return section | {"quant_method": "auto-round", "packing_format": layout, "data_type": "int"}
    return section | {"quant_method": "gptq", "checkpoint_format": layout}


def make_classic(
    source: TinyCheckpoint, layout: str, *, group_size: int = 32, symmetric: bool = True, seed: int = 0
) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Replace the experts of a BF16 checkpoint by random INT4; unsigned codes, scales and zero points by module."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name in [name for tensors in source.shards.values() for name in tensors if ".experts." in name]:
        shard, weight = source.shard_of(name), source.remove(name)
        module, shape = name.removesuffix(".weight"), weight.shape
        unsigned = torch.randint(0, 16, shape, generator=generator)
        scale = torch.rand((shape[0], shape[1] // group_size), generator=generator).add(0.1).mul(0.01).half()
        zero = torch.full(scale.shape, 8) if symmetric else torch.randint(1, 16, scale.shape, generator=generator)
        if layout.removeprefix("auto_round:auto_") == "awq":
            tensors = awq_tensors(unsigned, scale, zero)
        else:
            tensors = gptq_tensors(unsigned, scale, zero, less=0 if layout == "gptq_v2" else 1)
        for leaf, tensor in tensors.items():
            source.put(f"{module}.{leaf}", tensor, shard)
        made[module] = (unsigned, scale, zero)
    source.config["quantization_config"] = section_of(layout, group_size=group_size, symmetric=symmetric)
    source.write()
    return made
