"""compressed-tensors `pack-quantized`, as SGLang and vLLM load it.

A quantized Linear of weight [R, C] is stored as ``weight_packed`` int32 [R, C/8], ``weight_scale`` BF16 [R, C/group]
and ``weight_shape`` int64 [2]; ``weight`` is gone. Format: compressed-tensors 0.17 to 0.20.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics import packing
from quantkit.tensors import BF16, I32, I64, TensorSpec

PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"
ZERO_POINT, GROUP_INDEX = "weight_zero_point", "weight_g_idx"
CODES_PER_WORD = 8


def stored_specs(num_rows: int, num_cols: int, *, group_size: int) -> dict[str, TensorSpec]:
    """Leaf name to spec of one quantized Linear."""
    return {
        PACKED: TensorSpec(I32, (num_rows, -(-num_cols // CODES_PER_WORD))),
        SCALE: TensorSpec(BF16, (num_rows, num_cols // group_size)),
        SHAPE: TensorSpec(I64, (2,)),
    }


def pack(codes_RC: NDArray[np.int8]) -> NDArray[np.int32]:
    """Eight codes a word, the first in the lowest four bits, stored as code + 8."""
    return packing.pack_int4(codes_RC)


def shape_tensor(num_rows: int, num_cols: int) -> NDArray[np.int64]:
    """``weight_shape``: loaded by both engines, never used to compute."""
    return np.array([num_rows, num_cols], dtype=np.int64)


def config_section(*, group_size: int, ignore: Sequence[str]) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint whose quantized Linears all share one INT4 group.

    ``Linear`` stays the target: SGLang turns shared-expert fusion off only then. ``actorder`` is always null, and
    there are no KV scales: they would be ignored or harmful for these families.
    """
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": "pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def is_matched(module: str, entries: Iterable[str]) -> bool:
    """Whether a name hits an ignore or target entry: exact, or ``re:`` anchored at the start (not at the end)."""
    return any(
        re.match(entry[3:], module) is not None if entry.startswith("re:") else entry == module for entry in entries
    )


def ignore_list(
    *,
    unquantized: Sequence[str],
    quantized: Iterable[str],
    patterns: Sequence[str],
    fused: Mapping[str, Sequence[str]],
) -> list[str]:
    """Entries that hit every unquantized Linear and no quantized one, derived from what was in fact done.

    ``patterns`` are the family's own (both the checkpoint's and the engines' fused names); one that
    hits a quantized module is left out, and what is then uncovered is named exactly, with a ``re:`` twin that any
    prefix matches. ``fused`` maps a leaf to the engines' fused leaves that contain it.
    """
    shapes = _name_shapes(quantized)
    kept = [entry for entry in patterns if not any(is_matched(name, [entry]) for name in shapes)]
    extra: list[str] = []
    for module in unquantized:
        if is_matched(module, kept):
            continue
        parent, _, leaf = module.rpartition(".")
        for name in (leaf, *fused.get(leaf, ())):
            full = f"{parent}.{name}" if parent else name
            extra += [full, f"re:.*{re.escape(full)}$"]
    return kept + list(dict.fromkeys(extra))


def _name_shapes(names: Iterable[str]) -> list[str]:
    """One example of each name up to its numbers: patterns see 60,000 experts through a handful."""
    examples: dict[str, str] = {}
    for name in names:
        examples.setdefault(re.sub(r"\d+", "0", name), name)
    return list(examples.values())
