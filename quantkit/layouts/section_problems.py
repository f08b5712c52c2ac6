"""Faults of a compressed-tensors section."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from quantkit.layouts.compressed_tensors import ALL_EXPERTS
from quantkit.patterns import matcher

W4A8_GROUP_SIZE = 128  # fixed in the kernels
_W4A8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
_NATIVE = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


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
    native = section.get("linear_fp8_config", _NATIVE)
    if not isinstance(native, Mapping) or any(native.get(key) != _NATIVE[key] for key in _NATIVE):
        yield f"linear_fp8_config is {str(native)[:80]!r}, not FP8 in blocks of 128 x 128"
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
    expected = {"num_bits": 4, "type": "int", "strategy": "group"}
    for key, value in expected.items():
        if weights.get(key) != value:
            yield f"{key} is {weights.get(key)!r}, not {value!r}"
    for key in ("actorder", "dynamic"):
        if weights.get(key):
            yield f"{key} is {weights[key]!r}: engines would read scales in another order or not at all"
    targets = group.get("targets")
    names = targets if isinstance(targets, list) and all(isinstance(one, str) for one in targets) else []
    if names[:1] != ["Linear"] or not all(one.endswith(ALL_EXPERTS) for one in names[1:]):
        yield f"targets is {group.get('targets')!r}: SGLang needs 'Linear'"
    if group.get("format", "pack-quantized") not in ("pack-quantized", None):
        yield f"format is {group['format']!r}"
    if not isinstance(weights.get("symmetric"), bool):
        yield f"symmetric is {weights.get('symmetric')!r}, not true or false"
    if group.get("output_activations"):
        yield "output activations are quantized, which no engine does for INT4"
    inputs = group.get("input_activations")
    if inputs and (not isinstance(inputs, Mapping) or any(inputs.get(key) != _W4A8[key] for key in _W4A8)):
        yield "input activations are quantized otherwise than as FP8 of each token, as they come"
    if inputs and (weights.get("group_size"), weights.get("symmetric")) != (W4A8_GROUP_SIZE, True):
        yield f"quantized activations need symmetric groups of {W4A8_GROUP_SIZE}"
