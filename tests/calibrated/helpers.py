"""Small models that transformers runs, and the tokens that they see."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.test_transformers import quantize_source, save_model


def tiny_glm(directory: Path) -> Path:
    """An FP8 checkpoint of a random GLM-MoE-DSA model of three layers, two of them with experts."""
    save_model(directory / "saved", 0)
    quantize_source(directory / "saved", directory / "source", directory / "decoded")
    return directory / "source"


def save_tokens(path: Path, *, sequences: int = 8, length: int = 48) -> Path:
    ids = torch.randint(0, 256, (sequences, length), generator=torch.Generator().manual_seed(5))
    save_file({"input_ids": ids}, path)
    return path
