"""INT4 matrix products in plain torch: what the kernels must come close to.

Suffixes: ``R`` rows (out), ``C`` columns (in), ``G`` groups, ``T`` tokens, ``E`` experts.
"""

import torch


def dequantize_int4(weight_packed: torch.Tensor, weight_scale: torch.Tensor, *, group_size: int) -> torch.Tensor:
    """Weights in float32 [..., R, C] of words int32 [..., R, C / 8] and scales [..., R, G]: code times scale."""
    shift = torch.arange(0, 32, 4, dtype=torch.int32, device=weight_packed.device)
    codes = ((weight_packed.unsqueeze(-1) >> shift) & 15) - 8
    codes = codes.reshape(*weight_scale.shape, group_size)
    return (codes * weight_scale.float().unsqueeze(-1)).flatten(-2)


def int4_gemm(
    x: torch.Tensor, weight_packed: torch.Tensor, weight_scale: torch.Tensor, *, group_size: int
) -> torch.Tensor:
    """``x`` [..., C] times the transposed weight [R, C]; computed in float32, or in float64 where ``x`` is."""
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = dequantize_int4(weight_packed, weight_scale, group_size=group_size).to(wide)
    return (x.to(wide) @ weight.mT).to(x.dtype)
