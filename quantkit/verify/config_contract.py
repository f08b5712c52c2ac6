"""Does quantization_config say of every Linear what is on disk? A mismatch loads as garbage, or not at all."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.codecs.fp8_block import Fp8Block
from quantkit.families.family import BUILT_WITHOUT_CONFIG, Family, Role
from quantkit.layouts import w4afp8
from quantkit.layouts.section_problems import section_problems
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
    if section.get("quant_method") == w4afp8.METHOD:
        yield from _check_w4afp8(binding, family)
        return
    problems = list(section_problems(section))
    yield from (Finding(check=_CHECK, message=problem, file=CONFIG_NAME) for problem in problems)
    if problems:
        return
    said = _Said(
        is_ignored=matcher(section.get("ignore") or []),
        is_fp8=matcher(_fp8_targets(section)),
        has_native_linears="linear_fp8_config" in section,
    )
    for weight in binding.weights.values():
        fault = _fault(weight, said, family)
        if fault:
            yield Finding(check=_CHECK, message=fault, tensor=weight.name)


class _Said(NamedTuple):
    """What a section says of modules."""

    is_ignored: Callable[[str], bool]
    is_fp8: Callable[[str], bool]
    has_native_linears: bool


def _fault(weight: Weight, said: _Said, family: Family) -> str:
    """What a section says otherwise than the weight is stored; empty where it is right."""
    module = weight.module
    if isinstance(weight.codec, Fp8Block):
        return _fp8_fault(weight, said)
    if weight.is_matrix and said.is_fp8(module):
        return "is not FP8, but the config says so"
    if weight.is_native_int4:
        return "is INT4, but the config ignores it" if said.is_ignored(module) else ""
    if _is_asked_for(weight, family) and not said.is_ignored(module):
        return "is a plain Linear that the config makes INT4"
    return ""


def _fp8_fault(weight: Weight, said: _Said) -> str:
    if said.has_native_linears:
        return "" if _has_native_names(weight) else "is FP8 under names that native Linears have not"
    if not said.is_fp8(weight.module):
        return "is FP8, which the config does not declare"
    return "is FP8, but the config ignores it" if said.is_ignored(weight.module) else ""


def _has_native_names(weight: Weight) -> bool:
    return weight.parts["scale"].name.endswith(".weight_scale_inv")


def _check_w4afp8(binding: Binding, family: Family) -> Iterator[Finding]:
    """Routed experts are INT4, and every other Linear that is asked for is native FP8."""
    for weight in binding.weights.values():
        is_expert = family.role_of(weight.name) is Role.ROUTED_EXPERT
        if weight.is_native_int4 != is_expert and weight.is_matrix:
            message = "is not INT4, as w4afp8 makes every expert" if is_expert else "is INT4 and no routed expert"
            yield Finding(check=_CHECK, message=message, tensor=weight.name)
        elif isinstance(weight.codec, Fp8Block) and not _has_native_names(weight):
            yield Finding(check=_CHECK, message="is FP8 under names that w4afp8 does not read", tensor=weight.name)
        elif _is_plain_linear(weight, family):
            yield Finding(check=_CHECK, message="is a plain Linear, and w4afp8 makes it FP8", tensor=weight.name)


def _is_plain_linear(weight: Weight, family: Family) -> bool:
    """Of those that ask for their storage; the indexer's fixed ones are BF16 in engines whatever they are here."""
    is_fixed = family.role_of(weight.name) is Role.INDEXER_FIXED
    return _is_asked_for(weight, family) and not is_fixed and not isinstance(weight.codec, Fp8Block)


def _fp8_targets(section: Mapping[str, Any]) -> list[str]:
    """Entries of all FP8 groups."""
    groups = (section.get("config_groups") or {}).values()
    return [entry for group in groups if group["weights"].get("type") == "float" for entry in group["targets"]]


def _is_asked_for(weight: Weight, family: Family) -> bool:
    """Whether it is a plain Linear for which the engines ask the config."""
    is_plain = weight.is_matrix and not weight.is_native_int4
    return is_plain and family.role_of(weight.name) not in BUILT_WITHOUT_CONFIG
