"""How kernels are run: on a GPU, or one program after the other in Triton's interpreter.

The interpreter multiplies bit patterns in BF16 dots, is wrong in BF16 arithmetic and in casts to FP8, and has no inline
assembly. A kernel that needs any of these takes ``INTERPRET`` as a constexpr and goes round it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import triton

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

IS_INTERPRETED: bool = triton.knobs.runtime.interpret


def on_device(tensor: torch.Tensor | None) -> AbstractContextManager[Any]:
    """Triton launches on the current device, whatever device its arguments are on: make it theirs."""
    return torch.cuda.device(tensor.device) if tensor is not None and tensor.is_cuda else nullcontext()


def check_runs(tensor: torch.Tensor) -> None:
    """Raise ValueError where no kernel can run on a tensor; after all other checks, which need no GPU."""
    if not (tensor.is_cuda or IS_INTERPRETED):
        raise ValueError(
            f"a kernel cannot run on {tensor.device}: move the tensors to a GPU, set TRITON_INTERPRET=1 before the "
            "import, or take the plain twin in quantkit_kernels.reference"
        )


def launches(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """For an op: its kernels run on the device of the first argument that is a tensor, or has one as ``array``."""

    @wraps(function)
    def run(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        tensors = (getattr(one, "array", one) for one in (*args, *options.values()))
        with on_device(next((one for one in tensors if isinstance(one, torch.Tensor)), None)):
            return function(*args, **options)

    return run
