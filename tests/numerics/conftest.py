"""Sources for the numerics tests, and their one comparison."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray


def _assert_same_bytes(label: str, expected: NDArray[Any], got: NDArray[Any]) -> None:
    assert got.dtype == expected.dtype, label
    assert got.shape == expected.shape, label
    different = np.flatnonzero(
        np.ascontiguousarray(expected).view(np.uint8) != np.ascontiguousarray(got).view(np.uint8)
    )
    assert not len(different), f"{label}: {len(different)} bytes differ, the first at {different[0]}"


@pytest.fixture
def assert_same_bytes() -> Callable[..., None]:
    return _assert_same_bytes


def _random_codes(rows: int, cols: int, seed: int) -> NDArray[np.uint8]:
    """Every E4M3 code but NaN, with spans of zeros, of subnormals, and of one repeated value."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, cols)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    for start in range(0, cols, 32):
        span = codes[:, start : start + 32]
        kind = rng.integers(0, 8, rows)
        span[kind == 0] = rng.choice([0x00, 0x80], span[kind == 0].shape)
        span[kind == 1] &= 0x87
        span[kind == 2] = np.where(span[kind == 2] & 1, 0xFE, 0x7E)
        span[kind == 3] &= 0x7F
    return codes


def _random_fp8(
    rows: int, cols: int, block: tuple[int, int], row_offset: int = 0
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes, and the scales of a grid that begins ``row_offset`` rows above them."""
    shape = (-(-(rows + row_offset) // block[0]), -(-cols // block[1]))
    scale = np.exp(np.random.default_rng(1).uniform(-12, 2, shape)).astype(np.float32)
    return _random_codes(rows, cols, seed=rows), scale


@pytest.fixture
def random_fp8() -> Callable[..., tuple[NDArray[np.uint8], NDArray[np.float32]]]:
    return _random_fp8


def _fp8_weight(weight: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes and scales of a weight in 128x128 blocks."""
    import torch

    blocks = torch.from_numpy(weight).reshape(weight.shape[0] // 128, 128, weight.shape[1] // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).numpy(), scale.numpy()


@pytest.fixture
def fp8_weight() -> Callable[..., tuple[NDArray[np.uint8], NDArray[np.float32]]]:
    return _fp8_weight
