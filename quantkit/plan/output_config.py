"""The output's config.json: the source's, with one quantization section that says what was done."""

import copy
from collections.abc import Sequence
from typing import Any

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.checkpoint.source import Checkpoint, quantization_section
from quantkit.codecs.float_values import HALF
from quantkit.codecs.int4_group import Int4Group
from quantkit.engines.fusion import FUSED_LEAVES
from quantkit.errors import SourceError
from quantkit.families.family import NOT_LINEAR, Family
from quantkit.layouts import Layout
from quantkit.layouts.compressed_tensors import section_problems
from quantkit.plan.plan import Action, Job

_SECTIONS = ("quantization_config", "compression_config")
_HALF_SPELLINGS = ("float16", "half", "fp16", "torch.float16", "torch.half")


def output_config(
    checkpoint: Checkpoint, family: Family, jobs: Sequence[Job], scheme: Int4Group, layout: Layout
) -> dict[str, Any]:
    """Section where the source has its own, and nowhere else; ``dtype`` bfloat16 where FP16 became BF16."""
    config: dict[str, Any] = copy.deepcopy(dict(checkpoint.config))
    parent, source_section = quantization_section(config)
    section = dict(source_section)
    is_native = any(job.weight.is_native_int4 for job in jobs)
    if not is_native or any(job.action != Action.COPY for job in jobs):
        section = layout.config_section(scheme, _ignore(family, jobs, layout), _fp8_targets(jobs, layout))
    else:
        problem = next(section_problems(section), None)
        if problem is not None:
            raise SourceError(f"quantization_config: {problem}", file=CONFIG_NAME, remedy="correct it in the source")
    for place in (config, config.get("text_config")):
        for key in _SECTIONS:
            if isinstance(place, dict):
                place.pop(key, None)
    if any(job.is_int4 for job in jobs):
        (config[parent] if parent else config)["quantization_config"] = section
    if any(job.weight.codec == HALF for job in jobs):
        _declare_bf16(config)
    return config


def _declare_bf16(section: dict[str, Any]) -> None:
    """Wherever the config says FP16, in any spelling and at any depth."""
    for key, value in section.items():
        if key in ("dtype", "torch_dtype") and value in _HALF_SPELLINGS:
            section[key] = "bfloat16"
        elif isinstance(value, dict):
            _declare_bf16(value)


def _fp8_targets(jobs: Sequence[Job], layout: Layout) -> list[str]:
    return layout.targets(
        [job.weight.module for job in jobs if job.is_fp8],
        others=[job.weight.module for job in jobs if job.weight.is_matrix and not job.is_fp8],
        fused=FUSED_LEAVES,
    )


def _ignore(family: Family, jobs: Sequence[Job], layout: Layout) -> list[str]:
    return layout.ignore_list(
        unquantized=[
            job.weight.module
            for job in jobs
            if job.weight.is_matrix and not (job.is_int4 or job.is_fp8) and job.role not in NOT_LINEAR
        ],
        quantized=[job.weight.module for job in jobs if job.is_int4 or job.is_fp8],
        patterns=family.ignore,
        fused=FUSED_LEAVES,
    )
