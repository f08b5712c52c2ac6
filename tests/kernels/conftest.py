"""Kernels run on a GPU where there is one, else in the interpreter: tests/conftest.py has chosen it by now."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
