"""Does quantization_config say of every Linear what is on disk? A mismatch loads as garbage, or not at all."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from quantkit.codecs.fp8_block import Fp8Block
from quantkit.codecs.int4_group import PackedInt4
from quantkit.codecs.weight import Weight
from quantkit.families.family import Family, Role
from quantkit.plan.binding import Binding
from quantkit.verify.report import Finding

_CHECK = "config and tensors"
# modules for which engines consult the config; router, head, eh_proj and vision are built without it
_CONSULTED = {
    *(Role.ROUTED_EXPERT, Role.SHARED_EXPERT, Role.DENSE_MLP, Role.ATTENTION, Role.KV_B, Role.INDEXER, Role.LINEAR),
}


def check_config(section: Mapping[str, Any], binding: Binding, family: Family) -> Iterator[Finding]:
    """Packed means targeted and not ignored; a plain Linear means ignored; nothing is left in FP8."""
    quantized = any(isinstance(weight.codec, PackedInt4) for weight in binding.weights.values())
    if not quantized:
        if section:
            yield Finding(check=_CHECK, message="config.json declares a quantization that no tensor has")
        return
    if section.get("format") != "pack-quantized":
        yield Finding(check=_CHECK, message=f"format is {section.get('format')!r}, engines need 'pack-quantized'")
    is_ignored = _matcher(section.get("ignore") or ())
    for weight in binding.weights.values():
        if isinstance(weight.codec, Fp8Block):
            yield Finding(check=_CHECK, message="is FP8, which the config does not declare", tensor=weight.name)
        elif isinstance(weight.codec, PackedInt4):
            if is_ignored(weight.module):
                yield Finding(check=_CHECK, message="is INT4, but the config ignores it", tensor=weight.name)
        elif _is_consulted(weight, family) and not is_ignored(weight.module):
            yield Finding(check=_CHECK, message="is a plain Linear that the config makes INT4", tensor=weight.name)


def _is_consulted(weight: Weight, family: Family) -> bool:
    is_matrix = len(weight.shape) == 2 and weight.name.endswith(".weight")
    return is_matrix and family.role_of(weight.name) in _CONSULTED


def _matcher(entries: Any) -> Any:
    exact = {entry for entry in entries if not entry.startswith("re:")}
    patterns = [re.compile(entry[3:]) for entry in entries if entry.startswith("re:")]
    return lambda module: module in exact or any(pattern.match(module) for pattern in patterns)
