"""What hooks tell, put off until the next forward.

The scheduler frees, grants and caches pages while a step is still running, on a stream of its own; the pages' content
is written in the order of the stream that runs the model. A tag must change in that order too: a page that a running
step still reads may be granted anew for the next step, and that is no fault. So events wait on the host, and are
carried out ahead of the next forward, on its stream.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

_KEPT_STEPS = (
    3  # tensors of another stream must outlive the kernels that read them; no more steps than two are in flight
)


def wait_for(tensor: Tensor) -> None:
    """For all streams of its device."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


class DeferredCalls:
    """Calls that wait for the next forward."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], object]] = []
        self._kept: deque[list[Callable[[], object]]] = deque(maxlen=_KEPT_STEPS)

    def add(self, call: Callable[..., object], *arguments: object) -> None:
        """Tensors among the arguments are the caller's to keep as they are."""
        self._waiting.append(partial(call, *arguments))

    def carry_out(self) -> None:
        """In their order, on the current stream."""
        calls, self._waiting = self._waiting, []
        for call in calls:
            call()
        self._kept.append(calls)
