"""INT4 matrix products in plain torch: what the kernels must come close to.

Suffixes: ``R`` rows (out), ``C`` columns (in), ``G`` groups, ``T`` tokens, ``E`` experts.
"""

import torch


def dequantize_int4(weight_packed: torch.Tensor, weight_scale: torch.Tensor, *, group_size: int) -> torch.Tensor:
    """Weights in float32 [..., R, C] of words int32 [..., R, C / 8] and scales [..., R, G]: code times scale."""
    shape = (*weight_packed.shape[:-1], weight_packed.shape[-1] * 8 // group_size) if weight_packed.ndim else ()
    if weight_packed.dtype != torch.int32 or tuple(weight_scale.shape) != shape:
        raise ValueError(
            f"words {weight_packed.dtype} {tuple(weight_packed.shape)} have int32 and scales {shape}, "
            f"not {tuple(weight_scale.shape)}"
        )
    shift = torch.arange(0, 32, 4, dtype=torch.int32, device=weight_packed.device)
    codes = ((weight_packed.unsqueeze(-1) >> shift) & 15) - 8
    codes = codes.reshape(*weight_scale.shape, group_size)
    return (codes * weight_scale.float().unsqueeze(-1)).flatten(-2)


def int4_gemm(
    x: torch.Tensor, weight_packed: torch.Tensor, weight_scale: torch.Tensor, *, group_size: int
) -> torch.Tensor:
    """``x`` [..., C] times the transposed weight [R, C]; computed in float32, or in float64 where ``x`` is.

    Raises ValueError for what is not as a checkpoint stores it: repacked words first go through ``unrepack``.
    """
    _check_stored(2, x, weight_packed)
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = dequantize_int4(weight_packed, weight_scale, group_size=group_size).to(wide)
    return (x.to(wide) @ weight.mT).to(x.dtype)


def int4_moe(
    x: torch.Tensor,
    gate_up_packed: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down_packed: torch.Tensor,
    down_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    group_size: int,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each expert on the tokens that chose it; ids that name no expert, here, add nothing.

    Raises ValueError for what is not as a checkpoint stores it: repacked words first go through ``unrepack``.
    """
    _check_stored(3, x, gate_up_packed, down_packed)
    if topk_ids.dtype.is_floating_point or topk_ids.shape != topk_weights.shape or topk_ids.shape[:-1] != x.shape[:1]:
        raise ValueError(
            f"topk_ids are integers [{len(x)}, k], and so many are topk_weights, not {topk_ids.dtype} "
            f"{tuple(topk_ids.shape)} and {tuple(topk_weights.shape)}"
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    for expert in range(len(gate_up_packed)):
        token, choice = _choices(topk_ids, expert, expert_map).unbind(1)
        if len(token) == 0:
            continue
        both = int4_gemm(x[token].to(wide), gate_up_packed[expert], gate_up_scale[expert], group_size=group_size)
        gate, up = both.chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        down = int4_gemm(hidden, down_packed[expert], down_scale[expert], group_size=group_size)
        out.index_add_(0, token, (topk_weights[token, choice].unsqueeze(-1) * down).to(wide))
    return out.to(x.dtype)


def _check_stored(num_dims: int, x: torch.Tensor, *words: torch.Tensor) -> None:
    """Of ``words`` the first is of the columns of ``x``."""
    for one in words:
        if one.ndim != num_dims:
            raise ValueError(
                f"words {tuple(one.shape)} are not in the {num_dims} dimensions of a checkpoint: unrepack repacked ones"
            )
    if not x.ndim or x.shape[-1] != words[0].shape[-1] * 8:
        raise ValueError(f"words {tuple(words[0].shape)} do not go with activations {tuple(x.shape)}")


def _choices(topk_ids: torch.Tensor, expert: int, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Token and place of each choice of a local expert."""
    if expert_map is None:
        return (topk_ids == expert).nonzero()
    known = (topk_ids >= 0) & (topk_ids < len(expert_map))
    local = torch.full(topk_ids.shape, -1, dtype=expert_map.dtype, device=topk_ids.device)
    local[known] = expert_map[topk_ids[known].long()]
    return (local == expert).nonzero()
