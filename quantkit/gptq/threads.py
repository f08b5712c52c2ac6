"""One thread for linear algebra: how many there are decides in which order it adds, and so the last bits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Of the calling thread; weights are worked on side by side instead."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
