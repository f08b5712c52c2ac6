"""Statistics of tiny checkpoints, made from arrays of numbers as a calibration would count them."""

from pathlib import Path

import numpy as np

from quantkit.checkpoint.source import open_checkpoint
from quantkit.families import family_of
from quantkit.families.kv_shape import LatentKv
from quantkit.kv_scales.make import KvScaleRequest, make_kv_scales
from quantkit.numerics.magnitudes import NUM_BINS, bins_of
from quantkit.statistics.file import write_statistics
from quantkit.weights.binding import bind_weights
from quantkit.weights.completeness import text_root
from quantkit.weights.identity import model_fingerprint
from quantkit.weights.source_form import source_form

SIGMAS = {"k": 4.0, "v": 0.3, "latent": 0.03, "rope": 1.0}
NUM_TOKENS = 3000


def numbers_of(checkpoint, sigmas=None, seed=0):
    """Numbers [tokens, rows, channels] of every part of every layer, by the name that statistics have."""
    family = family_of(checkpoint.config)
    shape = family.kv_shape(family.text_config(checkpoint.config))
    if isinstance(shape, LatentKv):
        sizes = {"latent": (-(-shape.latent_dim // 128), min(128, shape.latent_dim)), "rope": (1, shape.rope_dim)}
    else:
        sizes = dict.fromkeys(("k", "v"), (shape.num_kv_heads, shape.head_dim))
    generator = np.random.default_rng(seed)
    root = text_root(bound(checkpoint))
    numbers = {}
    for layer in range(family.num_layers(checkpoint.config)):
        for part, (rows, channels) in sizes.items():
            values = generator.standard_normal((NUM_TOKENS, rows, channels)) * (SIGMAS | (sigmas or {}))[part]
            values *= (1 + np.arange(rows))[:, None] * (1 + layer)
            numbers[f"{root}layers.{layer}.self_attn.{part}"] = values.astype(np.float32)
    return numbers


def bound(checkpoint):
    family = family_of(checkpoint.config)
    return bind_weights(checkpoint.tensors, source_form(checkpoint.quantization), family.fused_experts)


def arrays_of(numbers):
    """What a statistics file holds of them."""
    arrays = {}
    for name, values in numbers.items():
        rows = np.moveaxis(values, 1, 0).reshape(values.shape[1], -1)
        counts = [np.bincount(bins_of(row), minlength=NUM_BINS) for row in rows]
        arrays[f"{name}_histogram"] = np.stack(counts).astype(np.int64)
        arrays[f"{name}_absmax"] = np.abs(rows).max(axis=1)
    return arrays


def fingerprint(checkpoint):
    return model_fingerprint(bound(checkpoint), family_of(checkpoint.config), checkpoint.config)


def calibrated(directory: Path, path: Path, *, sigmas=None, change=None):
    """Statistics of a checkpoint in a file, and the numbers that they are of. ``change`` edits the arrays."""
    checkpoint = open_checkpoint(directory)
    numbers = numbers_of(checkpoint, sigmas)
    arrays = arrays_of(numbers)
    if change is not None:
        change(arrays)
    path.unlink(missing_ok=True)
    write_statistics(path, arrays, model=fingerprint(checkpoint), about={"tokens": str(NUM_TOKENS)})
    return numbers


def report_of(directory: Path, **request):
    checkpoint = open_checkpoint(directory)
    return make_kv_scales(checkpoint, family_of(checkpoint.config), KvScaleRequest(**request))
