"""Does quantization_config say of every Linear what is on disk? A mismatch loads as garbage, or not at all."""

from collections.abc import Iterator, Mapping
from typing import Any

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.codecs.fp8_block import Fp8Block
from quantkit.families.family import BUILT_WITHOUT_CONFIG, Family
from quantkit.layouts.compressed_tensors import section_problems
from quantkit.patterns import matcher
from quantkit.verify.report import Finding
from quantkit.weights.binding import Binding
from quantkit.weights.weight import Weight

_CHECK = "config and tensors"


def check_config(
    section: Mapping[str, Any], binding: Binding, family: Family, *, is_partial: bool = False
) -> Iterator[Finding]:
    """Packed means not ignored; a plain Linear means ignored, where engines ask; nothing is left in FP8.

    ``is_partial``: what is INT4 may lie in the part that is not there.
    """
    if not any(weight.is_native_int4 for weight in binding.weights.values()):
        if section and not is_partial:
            yield Finding(check=_CHECK, message="config.json declares a quantization that no tensor has")
        return
    problems = list(section_problems(section))
    yield from (Finding(check=_CHECK, message=problem, file=CONFIG_NAME) for problem in problems)
    if problems:
        return
    is_ignored = matcher(section.get("ignore") or [])
    is_fp8 = matcher(_fp8_targets(section))
    for weight in binding.weights.values():
        if isinstance(weight.codec, Fp8Block):
            if not is_fp8(weight.module):
                yield Finding(check=_CHECK, message="is FP8, which the config does not declare", tensor=weight.name)
            elif is_ignored(weight.module):
                yield Finding(check=_CHECK, message="is FP8, but the config ignores it", tensor=weight.name)
        elif weight.is_matrix and is_fp8(weight.module):
            yield Finding(check=_CHECK, message="is not FP8, but the config says so", tensor=weight.name)
        elif weight.is_native_int4 and is_ignored(weight.module):
            yield Finding(check=_CHECK, message="is INT4, but the config ignores it", tensor=weight.name)
        elif _is_asked_for(weight, family) and not is_ignored(weight.module):
            yield Finding(check=_CHECK, message="is a plain Linear that the config makes INT4", tensor=weight.name)


def _fp8_targets(section: Mapping[str, Any]) -> list[str]:
    """Entries of all FP8 groups."""
    groups = (section.get("config_groups") or {}).values()
    return [entry for group in groups if group["weights"].get("type") == "float" for entry in group["targets"]]


def _is_asked_for(weight: Weight, family: Family) -> bool:
    """Whether it is a plain Linear for which the engines ask the config."""
    is_plain = weight.is_matrix and not weight.is_native_int4
    return is_plain and family.role_of(weight.name) not in BUILT_WITHOUT_CONFIG
