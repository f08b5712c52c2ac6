"""Other ways of doing what the kernels do, with torch alone: what a server without them would run.

Nothing here waits for the GPU, so that all of it can be recorded in a CUDA graph. Suffixes: ``T`` tokens, ``P`` pairs
of token and expert, ``E`` experts, ``R`` rows (out), ``C`` columns (in), ``G`` groups, ``B`` bytes.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from quantkit_kernels.gemm import dequantize
from quantkit_kernels.requantize import Int4, Source
from quantkit_kernels.word_order import Int4Weight

Weight = tuple[Tensor, Tensor]  # words [E, R, C / 8] and scales [E, R, G] of a checkpoint
_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # public from torch 2.10 on


def decode_experts(weight: Weight, group_size: int) -> Tensor:
    """BF16 [E, R, C]."""
    words, scale = weight
    num_experts, num_rows, num_words = words.shape
    flat = Int4Weight(words.flatten(0, 1), scale.flatten(0, 1))
    decoded = dequantize(flat, num_cols=num_words * 8, group_size=group_size)
    return decoded.reshape(num_experts, num_rows, -1)


def grouped_experts(
    x_TC: Tensor, gate_up_ERC: Tensor, down_ERC: Tensor, topk_weights: Tensor, topk_ids: Tensor
) -> Tensor:
    """BF16 experts by torch's grouped product: an expert is read once, and only if it was chosen."""
    top_k = topk_ids.shape[-1]
    ids_P, order_P = topk_ids.flatten().sort(stable=True)
    numbers_E = torch.arange(len(gate_up_ERC), dtype=ids_P.dtype, device=ids_P.device)
    ends_E = torch.searchsorted(ids_P, numbers_E, right=True, out_int32=True)
    gate, up = _grouped_mm(x_TC[order_P // top_k], gate_up_ERC.mT, offs=ends_E).chunk(2, -1)
    sorted_PR = _grouped_mm(silu(gate) * up, down_ERC.mT, offs=ends_E)
    return _sum_of(torch.empty_like(sorted_PR).index_copy_(0, order_P, sorted_PR), topk_weights)


def decoded_experts(
    x_TC: Tensor, gate_up: Weight, down: Weight, topk_weights: Tensor, topk_ids: Tensor, *, group_size: int
) -> Tensor:
    """Decode, then BF16: for each pair its expert while these are fewer than all experts, else the whole layer."""
    if topk_ids.numel() >= len(gate_up[0]):
        weights = (decode_experts(gate_up, group_size), decode_experts(down, group_size))
        return grouped_experts(x_TC, *weights, topk_weights, topk_ids)
    ids_P = topk_ids.flatten()
    gate_up_PRC, down_PRC = (
        decode_experts((words[ids_P], scale[ids_P]), group_size) for words, scale in (gate_up, down)
    )
    x_PC1 = x_TC[:, None].expand(-1, topk_ids.shape[-1], -1).reshape(len(ids_P), -1, 1)
    gate, up = torch.bmm(gate_up_PRC, x_PC1).chunk(2, 1)
    return _sum_of(torch.bmm(down_PRC, silu(gate) * up).squeeze(-1), topk_weights)


def _sum_of(out_PR: Tensor, topk_weights: Tensor) -> Tensor:
    weighted = out_PR.reshape(*topk_weights.shape, -1) * topk_weights.unsqueeze(-1)
    return weighted.sum(1).to(out_PR.dtype)


def eager_store(latent: Tensor, rope: Tensor, slots: Tensor, cache: Tensor, *, layout: str) -> None:
    """``quantize_kv_mla`` of slots that are all in the cache, as a model does it that has no kernel for it."""
    if layout == "flat576":
        parts_TB = [_e4m3(part.float()) for part in (latent, rope)]
    else:
        tiles = latent.float().reshape(len(latent), -1, 128)
        scale_TG1 = tiles.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
        codes_TB = _e4m3(tiles / scale_TG1).flatten(1)
        parts_TB = [codes_TB, scale_TG1.flatten(1).view(torch.uint8), rope.view(torch.uint8)]
    cache[slots] = torch.cat(parts_TB, 1)


def _e4m3(values: Tensor) -> Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def eager_absmax(source: Source, *, group_size: int) -> Int4:
    """``quantize`` of FP8 codes in absmax mode, in the operations of compressed-tensors on a decoded weight."""
    assert source.scale is not None
    num_rows = len(source.array)
    device = source.array.device
    row_R, column_C = (
        torch.arange(size, device=device) // block for size, block in zip(source.array.shape, source.block, strict=True)
    )
    unit = source.scale[row_R][:, column_C]
    weight = (source.array.view(torch.float8_e4m3fn).float() * unit).to(torch.bfloat16)
    groups = weight.reshape(num_rows, -1, group_size)
    scale = groups.abs().amax(-1, keepdim=True) / 7.5
    scale = torch.where(scale == 0, torch.finfo(torch.bfloat16).eps, scale)
    codes = (groups / scale).clamp(-8, 7).round().to(torch.int32) + 8
    places = torch.arange(0, 32, 4, dtype=torch.int32, device=device)
    packed = (codes.reshape(num_rows, -1, 8) << places).sum(-1, dtype=torch.int32)
    return Int4(packed, scale.squeeze(-1))
