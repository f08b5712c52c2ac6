"""Kernels run on a GPU where there is one, else in the interpreter: tests/conftest.py has chosen it by now."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """What torch hands out uninitialised is NaN, or the largest integer: what a kernel does not write shows."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def quiet_numpy() -> Iterator[None]:
    """The interpreter's arithmetic is numpy's, which warns of what a GPU does in silence."""
    with np.errstate(all="ignore"):
        yield
