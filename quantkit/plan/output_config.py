"""The output's config.json: the source's, with one quantization section that says what was done."""

import copy
from collections.abc import Sequence
from typing import Any

from quantkit.checkpoint.source import Checkpoint, quantization_section
from quantkit.codecs.float_values import FloatValues
from quantkit.codecs.int4_group import Int4Group
from quantkit.engines.fusion import FUSED_LEAVES
from quantkit.families.family import NOT_LINEAR, Family
from quantkit.layouts import Layout
from quantkit.plan.plan import Action, Job
from quantkit.tensors import F16

_SECTIONS = ("quantization_config", "compression_config")


def output_config(
    checkpoint: Checkpoint, family: Family, jobs: Sequence[Job], scheme: Int4Group, layout: Layout
) -> dict[str, Any]:
    """Section where the source has its own, and nowhere else; ``dtype`` bfloat16 where FP16 became BF16."""
    config: dict[str, Any] = copy.deepcopy(dict(checkpoint.config))
    parent, source_section = quantization_section(config)
    section = dict(source_section)
    is_native = any(job.weight.is_native_int4 for job in jobs)
    if not is_native or any(job.action != Action.COPY for job in jobs):
        section = layout.config_section(scheme, _ignore(family, jobs, layout))
    for place in (config, config.get("text_config")):
        for key in _SECTIONS:
            if isinstance(place, dict):
                place.pop(key, None)
    if any(job.is_int4 for job in jobs):
        (config[parent] if parent else config)["quantization_config"] = section
    if any(job.weight.codec == FloatValues(dtype=F16) for job in jobs):
        for place in (config, config.get("text_config")):
            for key in ("dtype", "torch_dtype"):
                if isinstance(place, dict) and place.get(key) == "float16":
                    place[key] = "bfloat16"
    return config


def _ignore(family: Family, jobs: Sequence[Job], layout: Layout) -> list[str]:
    return layout.ignore_list(
        unquantized=[
            job.weight.module for job in jobs if job.weight.is_matrix and not job.is_int4 and job.role not in NOT_LINEAR
        ],
        quantized=[job.weight.module for job in jobs if job.is_int4],
        patterns=family.ignore,
        fused=FUSED_LEAVES,
    )
