"""The output's config.json: the source's, with one quantization section that says what was done."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.checkpoint.source import Checkpoint, quantization_section
from quantkit.codecs.float_values import HALF
from quantkit.codecs.int4_group import Int4Group
from quantkit.engines.fusion import FUSED_LEAVES
from quantkit.errors import SourceError
from quantkit.families.family import BUILT_WITHOUT_CONFIG, NOT_LINEAR, Family
from quantkit.layouts import Layout
from quantkit.layouts.layout import Declared
from quantkit.layouts.section_problems import section_problems
from quantkit.patterns import matcher
from quantkit.plan.mtp import expert_patterns, forget_mtp, mtp_layers
from quantkit.plan.plan import Action, Job
from quantkit.recipe import Recipe

_SECTIONS = ("quantization_config", "compression_config")
_HALF_SPELLINGS = ("float16", "half", "fp16", "torch.float16", "torch.half")


def output_config(
    checkpoint: Checkpoint, family: Family, jobs: Sequence[Job], recipe: Recipe, layout: Layout
) -> dict[str, Any]:
    """Section where the source has its own, and nowhere else; ``dtype`` bfloat16 where FP16 became BF16."""
    layers = mtp_layers(family, checkpoint.config)
    config: dict[str, Any] = copy.deepcopy(dict(checkpoint.config))
    parent, source_section = quantization_section(config)
    section = dict(source_section)
    is_copied = any(job.weight.is_native_int4 for job in jobs) and all(job.action == Action.COPY for job in jobs)
    if is_copied and layout.name == "compressed-tensors":
        problem = next(section_problems(section), None)
        if problem is not None:
            raise SourceError(f"quantization_config: {problem}", file=CONFIG_NAME, remedy="correct it in the source")
        is_copied = _ignores_all(section, jobs)
    if not is_copied:
        section = layout.config_section(_declared(family, layers, jobs, recipe))
    for place in (config, config.get("text_config")):
        for key in _SECTIONS:
            if isinstance(place, dict):
                place.pop(key, None)
    if any(job.is_int4 for job in jobs):
        (config[parent] if parent else config)["quantization_config"] = section
    if any(job.weight.codec == HALF for job in jobs):
        _declare_bf16(config)
    if recipe.mtp == "drop":
        forget_mtp(config)
    return config


def _ignores_all(section: Mapping[str, Any], jobs: Sequence[Job]) -> bool:
    """Whether a source's own section speaks of every plain Linear; else engines would look for INT4 there."""
    is_ignored = matcher(section.get("ignore") or [])
    plain = (job for job in jobs if job.weight.is_matrix and not (job.is_int4 or job.is_fp8))
    return all(is_ignored(job.weight.module) for job in plain if job.role not in BUILT_WITHOUT_CONFIG)


def scheme_of(recipe: Recipe) -> Int4Group:
    """The encoder that a recipe asks for."""
    return Int4Group(
        group_size=recipe.group_size,
        scales=recipe.scales,
        signed=recipe.signed_scales,
        zero_points=recipe.zero_points,
    )


def _declare_bf16(section: dict[str, Any]) -> None:
    """Wherever the config says FP16, in any spelling and at any depth."""
    for key, value in section.items():
        if key in ("dtype", "torch_dtype") and value in _HALF_SPELLINGS:
            section[key] = "bfloat16"
        elif isinstance(value, dict):
            _declare_bf16(value)


def _declared(family: Family, layers: range, jobs: Sequence[Job], recipe: Recipe) -> Declared:
    drafts = expert_patterns(layers)
    matrices = [job for job in jobs if job.weight.is_matrix and not (job.is_int4 or job.is_fp8)]
    return Declared(
        scheme=scheme_of(recipe),
        int4=[job.weight.module for job in jobs if job.is_int4],
        fp8=[job.weight.module for job in jobs if job.is_fp8],
        plain=[job.weight.module for job in matrices if job.role not in NOT_LINEAR],
        unasked=[job.weight.module for job in matrices if job.role in NOT_LINEAR],
        ignore_patterns=(*family.ignore, *(drafts if recipe.mtp == "bf16" else ())),
        fp8_patterns=drafts,
        fused=FUSED_LEAVES,
        has_native_linears=recipe.rest == "fp8-native",
        has_fp8_activations=recipe.activations == "fp8-dynamic",
    )
