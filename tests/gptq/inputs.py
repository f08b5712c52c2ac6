"""Weights and Hessians as models have them: inputs that go together, some channels much larger than others."""

import numpy as np
import torch
from numpy.typing import NDArray


def make_weight(seed: int, num_rows: int, num_cols: int) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_t(6, (num_rows, num_cols)) * 0.02).astype(np.float32)


def make_inputs(seed: int, num_tokens: int, num_cols: int, *, spread: float = 0.4) -> NDArray[np.float64]:
    """[tokens, columns]: a quarter as many directions as columns, and noise. ``spread``: of their logarithms."""
    rng = np.random.default_rng(1000 + seed)
    width = max(2, num_cols // 4)
    mixed = rng.standard_normal((width, num_cols)) * np.exp(-np.arange(width) / (width / 3))[:, None]
    inputs = rng.standard_normal((num_tokens, width)) @ mixed + 0.5 * rng.standard_normal((num_tokens, num_cols))
    return inputs * np.exp(spread * rng.standard_normal(num_cols))


def make_hessian(seed: int, num_cols: int, *, num_tokens: int = 1024) -> torch.Tensor:
    inputs = make_inputs(seed, num_tokens, num_cols)
    return torch.from_numpy(inputs.T @ inputs / num_tokens)
