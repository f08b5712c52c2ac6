"""compressed-tensors `pack-quantized`, as SGLang and vLLM load it.

A quantized Linear of weight [R, C] is stored as ``weight_packed`` int32 [R, C/8], ``weight_scale`` BF16 [R, C/group]
and ``weight_shape`` int64 [2], with zero points also ``weight_zero_point`` int32 [R/8, C/group]; ``weight`` is gone.
Format: compressed-tensors 0.17 to 0.20.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from quantkit.codecs.int4_group import Int4Group
from quantkit.layouts.layout import LAYOUTS, READERS, Declared, Stored, StoredPart
from quantkit.layouts.module_entries import entries_of, needed
from quantkit.numerics.packing import CODES_PER_WORD, Int4Words, pack_rows_int4, unpack_rows_int4
from quantkit.tensors import BF16, I32, I64, DType, TensorSpec

PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"
ZERO_POINT, GROUP_INDEX = "weight_zero_point", "weight_g_idx"
ALL_EXPERTS = r".*\.experts\.\d+\..*"
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}


class CompressedTensors:
    """Parts: ``packed``, ``scale``, ``shape``, with zero points also ``zero``."""

    name = "compressed-tensors"
    has_row_blocks = True

    @lru_cache(maxsize=1024)  # noqa: B019  (there is one layout of a kind, for as long as the process lives)
    def stored(
        self, scheme: Int4Group, num_rows: int, num_cols: int, scale_dtype: DType = BF16
    ) -> Mapping[str, StoredPart]:
        """Three tensors, or four."""
        num_groups = num_cols // scheme.group_size
        parts = {
            "packed": StoredPart(PACKED, TensorSpec(I32, (num_rows, -(-num_cols // CODES_PER_WORD)))),
            "scale": StoredPart(SCALE, TensorSpec(scale_dtype, (num_rows, num_groups))),
            "shape": StoredPart(SHAPE, TensorSpec(I64, (2,)), rows_each=0),
        }
        if scheme.zero_points:
            words = TensorSpec(I32, (-(-num_rows // CODES_PER_WORD), num_groups))
            parts["zero"] = StoredPart(ZERO_POINT, words, rows_each=CODES_PER_WORD)
        return parts

    def from_words(self, words: Int4Words) -> Stored:
        """The words as they are; zero points of eight rows in a word."""
        stored: dict[str, Any] = {"packed": words.packed, "scale": words.scale}
        if words.zero is not None:
            stored["zero"] = pack_rows_int4(words.zero)
        return stored

    def to_words(self, stored: Stored) -> Int4Words:
        """Of whole words of rows, where there are zero points."""
        zero = stored.get("zero")
        num_rows = len(stored["packed"])
        return Int4Words(stored["packed"], stored["scale"], None if zero is None else unpack_rows_int4(zero, num_rows))

    def constants(self, num_rows: int, num_cols: int) -> Stored:
        """``weight_shape``: loaded by both engines, never used to compute."""
        return {"shape": np.array([num_rows, num_cols], dtype=np.int64)}

    def config_section(self, declared: Declared) -> dict[str, Any]:
        """One INT4 group, and one of FP8 blocks where something has stayed in them.

        ``Linear`` stays the target of INT4: SGLang turns shared-expert fusion off only then. There are no KV scales:
        they would be ignored or harmful for these families. The format at the top is what SGLang's experts read; a
        group's own is what everything else does.
        """
        groups = {"group_0": _int4_group(declared)}
        if declared.fp8 and not declared.has_native_linears:
            targets = _fp8_targets(declared)
            groups["group_0"]["targets"] = _int4_targets(targets)
            groups["group_1"] = _fp8_group(targets)
        section: dict[str, Any] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": _ignore(declared),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }
        if declared.has_native_linears:
            section["linear_fp8_config"] = {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "weight_block_size": [128, 128],
            }
        return section


def _int4_group(declared: Declared) -> dict[str, Any]:
    """``actorder`` is always null: with "weight" SGLang would read scales of the whole width."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": not declared.scheme.zero_points,
        "strategy": "group",
        "group_size": declared.scheme.group_size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    return {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": _FP8 | {"strategy": "token", "dynamic": True} if declared.has_fp8_activations else None,
        "output_activations": None,
        "format": "pack-quantized",
    }


def _fp8_group(targets: Sequence[str]) -> dict[str, Any]:
    """FP8 in blocks of 128 x 128, activations quantized as they come, in groups of 128."""
    return {
        "targets": list(targets),
        "weights": _FP8 | {"strategy": "block", "block_structure": [128, 128], "dynamic": False},
        "input_activations": _FP8 | {"strategy": "group", "group_size": 128, "dynamic": True},
        "output_activations": None,
        "format": "float-quantized",
    }


def _int4_targets(fp8_targets: Sequence[str]) -> list[str]:
    """``Linear``, and the experts by name, but for those in FP8: transformers takes the first group with a pattern that
    mentions experts for theirs, and shared ones must not be that."""
    others = [entry[3:] for entry in fp8_targets if r"mlp\.experts\." in entry]
    return ["Linear", "re:" + "".join(f"(?!{pattern})" for pattern in others) + ALL_EXPERTS]


def _fp8_targets(declared: Declared) -> list[str]:
    """Entries that hit what is FP8 and nothing else."""
    others = (*declared.int4, *declared.plain, *declared.unasked)
    patterns = needed(declared.fp8_patterns, declared.fp8)
    return entries_of(declared.fp8, others=others, patterns=patterns, fused=declared.fused)


def _ignore(declared: Declared) -> list[str]:
    """Derived from what was in fact done. SGLang's native FP8 Linears never ask, so patterns may hit them."""
    others = declared.int4 if declared.has_native_linears else (*declared.int4, *declared.fp8)
    return entries_of(declared.plain, others=others, patterns=declared.ignore_patterns, fused=declared.fused)


READERS.add(CompressedTensors.name, LAYOUTS.add(CompressedTensors.name, CompressedTensors()))
