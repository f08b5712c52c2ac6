"""What every op asks of its tensors, and how an error shows one."""

import torch


def check_devices(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError for a tensor that is not on the device of the first."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(given))
    for name, tensor in given.items():
        if tensor.device != given[first].device:
            raise ValueError(f"{name} is on {tensor.device}, {first} on {given[first].device}")


def check_inference(*tensors: torch.Tensor) -> None:
    """Raise RuntimeError where autograd would wait for a gradient: no op here has one."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise RuntimeError("the kernels are for inference only, and have no gradient: wrap the call in torch.no_grad()")


def seen(tensor: torch.Tensor) -> str:
    """What a tensor is, with its strides where these are not those of its shape."""
    strides = "" if tensor.is_contiguous() else f" of strides {tensor.stride()}"
    return f"{tensor.dtype} {tuple(tensor.shape)}{strides}"
