"""compressed-tensors `pack-quantized`, as SGLang and vLLM load it.

A quantized Linear of weight [R, C] is stored as ``weight_packed`` int32 [R, C/8], ``weight_scale`` BF16 [R, C/group]
and ``weight_shape`` int64 [2]; ``weight`` is gone. Format: compressed-tensors 0.17 to 0.20.
"""

import bisect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.codecs.int4_group import Int4Group
from quantkit.layouts.layout import LAYOUTS, Stored, StoredPart
from quantkit.numerics import packing
from quantkit.patterns import is_matched, matcher
from quantkit.tensors import BF16, I32, I64, TensorSpec

PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"
ZERO_POINT, GROUP_INDEX = "weight_zero_point", "weight_g_idx"
CODES_PER_WORD = 8
_ALL_EXPERTS = r".*\.experts\.\d+\..*"
_LAYER = re.compile(r"\blayers\.\d+\.")
_SAME_DIGITS = str.maketrans("123456789", "000000000")
_NO_DIGITS = str.maketrans("", "", "0123456789")


class CompressedTensors:
    """Parts: ``packed``, ``scale``, ``shape``."""

    name = "compressed-tensors"

    @lru_cache(maxsize=1024)  # noqa: B019  (there is one layout of a kind, for as long as the process lives)
    def stored(self, scheme: Int4Group, num_rows: int, num_cols: int) -> Mapping[str, StoredPart]:
        """Three tensors."""
        return {
            "packed": StoredPart(PACKED, TensorSpec(I32, (num_rows, -(-num_cols // CODES_PER_WORD)))),
            "scale": StoredPart(SCALE, TensorSpec(BF16, (num_rows, num_cols // scheme.group_size))),
            "shape": StoredPart(SHAPE, TensorSpec(I64, (2,)), has_rows=False),
        }

    def pack(self, codes_RC: NDArray[np.int8], scale_RG: NDArray[np.uint16]) -> Stored:
        """Eight codes a word, the first in the lowest four bits, stored as code + 8."""
        return {"packed": packing.pack_int4(codes_RC), "scale": scale_RG}

    def unpack(self, stored: Stored, num_cols: int) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
        """Codes and scales of ``packed`` and ``scale``."""
        return packing.unpack_int4(stored["packed"], num_cols), stored["scale"]

    def constants(self, num_rows: int, num_cols: int) -> Stored:
        """``weight_shape``: loaded by both engines, never used to compute."""
        return {"shape": np.array([num_rows, num_cols], dtype=np.int64)}

    def config_section(
        self, scheme: Int4Group, ignore: Sequence[str], fp8_targets: Sequence[str] = ()
    ) -> dict[str, Any]:
        """One INT4 group, and one of FP8 blocks where something has stayed in them.

        ``Linear`` stays the target of INT4: SGLang turns shared-expert fusion off only then. ``actorder`` is always
        null, and there are no KV scales: they would be ignored or harmful for these families. The format at the top is
        what SGLang's experts read; a group's own is what everything else does.
        """
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": scheme.group_size,
            "dynamic": False,
            "actorder": None,
            "block_structure": None,
            "observer": "minmax",
            "observer_kwargs": {},
        }
        groups: dict[str, dict[str, Any]] = {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
        }
        if fp8_targets:
            groups["group_0"]["targets"] = _int4_targets(fp8_targets)
            groups["group_1"] = _fp8_group(fp8_targets)
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(ignore),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def targets(
        self,
        modules: Iterable[str],
        *,
        others: Iterable[str],
        patterns: Sequence[str],
        fused: Mapping[str, Sequence[str]],
    ) -> list[str]:
        """Entries that hit the modules, in the files and as engines fuse them, and none of ``others``.

        Those of ``patterns`` that hit some of them, and nothing else, come first.
        """
        wanted, unwanted = list(modules), list(others)
        hits, misses = _examples(wanted), _examples(unwanted)
        kept = [
            pattern
            for pattern in patterns
            if any(is_matched(pattern, one) for one in hits) and not any(is_matched(pattern, one) for one in misses)
        ]
        is_covered = matcher(kept)
        return kept + _entries([module for module in wanted if not is_covered(module)], unwanted, fused)

    def ignore_list(
        self,
        *,
        unquantized: Sequence[str],
        quantized: Iterable[str],
        patterns: Sequence[str],
        fused: Mapping[str, Sequence[str]],
    ) -> list[str]:
        """Derived from what was in fact done.

        ``patterns`` are the family's own (both the checkpoint's and the engines' fused names); one that hits a
        quantized module is left out, and what is then uncovered is named. ``fused`` maps a leaf to the engines' fused
        leaves that contain it.
        """
        names = list(quantized)
        examples = _examples(names)  # enough, since the patterns of a family name no numbers
        kept = [entry for entry in patterns if not any(is_matched(entry, name) for name in examples)]
        is_covered = matcher(kept)
        uncovered = [module for module in unquantized if not is_covered(module)]
        return kept + _entries(uncovered, names, fused)


def _int4_targets(fp8_targets: Sequence[str]) -> list[str]:
    """``Linear``, and the experts by name, but for those in FP8: transformers takes the first group with a pattern that
    mentions experts for theirs, and shared ones must not be that."""
    others = [entry[3:] for entry in fp8_targets if r"mlp\.experts\." in entry]
    return ["Linear", "re:" + "".join(f"(?!{pattern})" for pattern in others) + _ALL_EXPERTS]


def _fp8_group(targets: Sequence[str]) -> dict[str, Any]:
    """FP8 in blocks of 128 x 128, activations quantized as they come, in groups of 128."""
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "targets": list(targets),
        "weights": common | {"strategy": "block", "block_structure": [128, 128], "dynamic": False},
        "input_activations": common | {"strategy": "group", "group_size": 128, "dynamic": True},
        "output_activations": None,
        "format": "float-quantized",
    }


def _entries(modules: Sequence[str], others: Sequence[str], fused: Mapping[str, Sequence[str]]) -> list[str]:
    """One pattern for a module of every layer, where it hits none of ``others``; else the exact name, with a ``re:``
    twin that any prefix matches unless that hits one. Fused names that contain the module come along."""
    if not modules:
        return []
    examples, is_suffix = _examples(others), _suffix_finder(others)
    is_clean: dict[str, bool] = {}
    entries: dict[str, None] = {}
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        pattern = _pattern_of(module)
        if pattern not in is_clean:
            is_clean[pattern] = bool(pattern) and not any(is_matched(pattern, one) for one in examples)
        for name in (leaf, *fused.get(leaf, ())):
            full = f"{parent}.{name}" if parent else name
            if is_clean[pattern]:
                entries[_pattern_of(full)] = None
                continue
            entries[full] = None
            if not is_suffix(full):
                entries[f"re:.*{re.escape(full)}$"] = None
    return list(entries)


def _pattern_of(module: str) -> str:
    """For the module of every layer; empty for one that lies in none, or has another number, which examples hide."""
    layer = _LAYER.search(module)
    tail = "" if layer is None else module[layer.end() :]
    return rf"re:.*\.{re.escape(tail)}$" if tail and tail == tail.translate(_NO_DIGITS) else ""


def section_problems(section: Mapping[str, Any]) -> Iterator[str]:
    """What in a ``quantization_config`` keeps engines from loading packed INT4, or makes them load it wrong."""
    if section.get("format") != "pack-quantized":
        yield f"format is {section.get('format')!r}, engines need 'pack-quantized'"
    if section.get("quantization_status", "compressed") != "compressed":
        yield f"quantization_status is {section['quantization_status']!r}, not 'compressed'"
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if section.get(key):
            yield f"{key} is set, which no tensor here answers"
    entries = section.get("ignore") or []
    try:
        if not isinstance(entries, list):
            raise TypeError("not a list")
        matcher(entries)
    except (re.error, TypeError, AttributeError) as error:
        yield f"ignore is {str(entries)[:80]!r}, not a list of names and patterns ({error})"
    groups = section.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        yield from (f"config_groups.{name}: {problem}" for problem in _group_problems(group))


def _group_problems(group: Any) -> Iterator[str]:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        yield "has no weights"
        return
    is_fp8 = (weights.get("type"), weights.get("num_bits")) == ("float", 8)
    yield from _fp8_problems(group, weights) if is_fp8 else _int4_problems(group, weights)


def _fp8_problems(group: Mapping[str, Any], weights: Mapping[str, Any]) -> Iterator[str]:
    """Of what may stand beside INT4."""
    if weights.get("strategy") != "block" or weights.get("block_structure") != [128, 128]:
        yield "FP8 is not in blocks of 128 x 128"
    if group.get("format") != "float-quantized":
        yield f"format of FP8 is {group.get('format')!r}, not 'float-quantized'"
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets) or "Linear" in targets:
        yield f"targets of FP8 is {str(targets)[:80]!r}: 'Linear' belongs to INT4"


def _int4_problems(group: Mapping[str, Any], weights: Mapping[str, Any]) -> Iterator[str]:
    expected = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    for key, value in expected.items():
        if weights.get(key) != value:
            yield f"{key} is {weights.get(key)!r}, not {value!r}"
    for key in ("actorder", "dynamic"):
        if weights.get(key):
            yield f"{key} is {weights[key]!r}: engines would read scales in another order or not at all"
    targets = group.get("targets")
    names = targets if isinstance(targets, list) and all(isinstance(one, str) for one in targets) else []
    if names[:1] != ["Linear"] or not all(one.endswith(_ALL_EXPERTS) for one in names[1:]):
        yield f"targets is {group.get('targets')!r}: SGLang needs 'Linear'"
    if group.get("format", "pack-quantized") not in ("pack-quantized", None):
        yield f"format is {group['format']!r}"
    if group.get("input_activations") or group.get("output_activations"):
        yield "activations are quantized, which these scales were not made for"


def _suffix_finder(names: Iterable[str]) -> Callable[[str], bool]:
    """Whether any of the names ends with a text, in logarithmic time."""
    reversed_names = sorted(name[::-1] for name in names)

    def is_suffix(text: str) -> bool:
        place = bisect.bisect_left(reversed_names, text[::-1])
        return place < len(reversed_names) and reversed_names[place].startswith(text[::-1])

    return is_suffix


def _examples(names: Iterable[str]) -> list[str]:
    """One of each name up to its digits: patterns see 60,000 experts through a handful."""
    found: dict[str, str] = {}
    for name in names:
        found.setdefault(name.translate(_SAME_DIGITS), name)
    return list(found.values())


LAYOUTS.add(CompressedTensors.name, CompressedTensors())
