"""The output's config.json: the source's, with one quantization section that says what was done."""

import copy
from collections.abc import Sequence
from typing import Any

from quantkit.checkpoint.source import Checkpoint, quantization_section
from quantkit.codecs.float_values import FloatValues
from quantkit.codecs.int4_group import Int4Group, PackedInt4
from quantkit.engines.fusion import FUSED_LEAVES
from quantkit.families.family import Family, Role
from quantkit.layouts import compressed_tensors as ct
from quantkit.plan.model import Action, Job
from quantkit.plan.source_form import SourceForm
from quantkit.tensors import F16

_SECTIONS = ("quantization_config", "compression_config")
_NOT_LINEAR = {Role.EMBEDDING, Role.NORM, Role.ROUTER_BIAS}


def output_config(
    checkpoint: Checkpoint, family: Family, jobs: Sequence[Job], target: Int4Group, form: SourceForm
) -> dict[str, Any]:
    """Section where the source has its own, and nowhere else; ``dtype`` bfloat16 where FP16 became BF16."""
    config: dict[str, Any] = copy.deepcopy(dict(checkpoint.config))
    parent, source_section = quantization_section(config)
    section = dict(source_section)
    is_native = any(isinstance(job.weight.codec, PackedInt4) for job in jobs)
    has_changed = any(job.action != Action.COPY for job in jobs)
    if has_changed or not is_native:
        section = _section(family, jobs, target)
    for place in (config, config.get("text_config")):
        for key in _SECTIONS:
            if isinstance(place, dict):
                place.pop(key, None)
    if any(_is_quantized(job) for job in jobs):
        (config[parent] if parent else config)["quantization_config"] = section
    if any(job.weight.codec == FloatValues(dtype=F16) for job in jobs):
        for place in (config, config.get("text_config")):
            for key in ("dtype", "torch_dtype"):
                if isinstance(place, dict) and place.get(key) == "float16":
                    place[key] = "bfloat16"
    return config


def _is_quantized(job: Job) -> bool:
    return job.action == Action.INT4 or isinstance(job.weight.codec, PackedInt4)


def _section(family: Family, jobs: Sequence[Job], target: Int4Group) -> dict[str, Any]:
    quantized = [job.weight.module for job in jobs if _is_quantized(job)]
    unquantized = [
        job.weight.module
        for job in jobs
        if not _is_quantized(job)
        and len(job.weight.shape) == 2
        and job.weight.name.endswith(".weight")
        and job.role not in _NOT_LINEAR
    ]
    ignore = ct.ignore_list(unquantized=unquantized, quantized=quantized, patterns=family.ignore, fused=FUSED_LEAVES)
    return ct.config_section(group_size=target.group_size, ignore=ignore)
