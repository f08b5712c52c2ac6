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


@pytest.fixture(scope="session")
def convert():
    """Skips where something is missing that serving does not need."""
    for name in ("pydantic", "compressed_tensors"):
        pytest.importorskip(name, reason=f"to convert and to decompress wants {name}")
    from tests.convert.helpers import convert

    return convert


@pytest.fixture(scope="session", params=["glm_moe_dsa", "glm4_moe", "deepseek_v3"])
def converted(request, convert, tmp_path_factory):
    from tests.tiny import write_checkpoint

    directory = tmp_path_factory.mktemp(request.param)
    source = write_checkpoint(directory / "source", model_type=request.param, mtp=request.param == "glm_moe_dsa")
    convert(source.directory, directory / "out")
    return directory / "out"
