"""What every op asks of its tensors, and how an error shows one."""

import torch


def check_devices(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError for a tensor that is not on the device of the first."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(given))
    for name, tensor in given.items():
        if tensor.device != given[first].device:
            raise ValueError(f"{name} is on {tensor.device}, {first} on {given[first].device}")


def check_activations(x: torch.Tensor, *, num_dims: int | None = None) -> None:
    """Raise ValueError for activations of another dtype or number of dimensions than the products'."""
    if x.dtype not in (torch.bfloat16, torch.float16) or not x.ndim or num_dims not in (None, x.ndim):
        wanted = "[..., columns]" if num_dims is None else "[tokens, columns]"
        raise ValueError(f"activations are BF16 or FP16 {wanted}, not {x.dtype} {tuple(x.shape)}")


def check_router(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None) -> None:
    """Raise ValueError for what does not choose experts for each token of ``x``; devices are another check."""
    if ids.shape != weights.shape or ids.ndim != 2 or len(ids) != len(x):
        raise ValueError(f"{len(x)} tokens, weights {tuple(weights.shape)}, ids {tuple(ids.shape)}")
    if not weights.is_floating_point():
        raise ValueError(f"topk_weights are floats, not {weights.dtype}")
    for name, one in (("topk_ids", ids), ("expert_map", expert_map)):
        if one is not None and one.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} is int32 or int64 on {x.device}, not {one.dtype} on {one.device}")
    if expert_map is not None and expert_map.ndim != 1:
        raise ValueError(f"expert_map is [global experts], not {tuple(expert_map.shape)}")


def check_inference(*tensors: torch.Tensor) -> None:
    """Raise RuntimeError where autograd would wait for a gradient: no op here has one."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise RuntimeError("the kernels are for inference only, and have no gradient: wrap the call in torch.no_grad()")


def seen(tensor: torch.Tensor) -> str:
    """What a tensor is, with its strides where these are not those of its shape."""
    strides = "" if tensor.is_contiguous() else f" of strides {tensor.stride()}"
    return f"{tensor.dtype} {tuple(tensor.shape)}{strides}"
