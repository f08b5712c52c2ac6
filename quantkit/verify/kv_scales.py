"""KV scales that were added to an output: what its plan says with them."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantkit.checkpoint.file_names import MANIFEST_NAME
from quantkit.checkpoint.source import quantization_section
from quantkit.errors import VerificationError
from quantkit.plan.plan import Plan, PlannedShard
from quantkit.tensors import F32, TensorSpec

KEY = "kv_scales"  # of the manifest


def added_document(shard: str, shapes: Mapping[str, tuple[int, ...]], section: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest says of scales that were added: their shard, their tensors, and what they add to the config."""
    tensors = {name: list(shape) for name, shape in sorted(shapes.items())}
    return {"shard": shard, "tensors": tensors, "quantization_config": dict(section)}


def with_kv_scales(plan: Plan, manifest: Mapping[str, Any]) -> Plan:
    """The plan that an output was made by, and its scales where the manifest tells of any."""
    document = manifest.get(KEY)
    if document is None:
        return plan
    try:
        shapes = {str(name): tuple(int(size) for size in shape) for name, shape in document["tensors"].items()}
        specs = {name: TensorSpec(F32, shape) for name, shape in shapes.items()}
        shard = PlannedShard(name=str(document["shard"]), jobs=(), specs=specs)
        section = dict(document["quantization_config"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise VerificationError(
            f"its {KEY} are garbled ({error})", file=MANIFEST_NAME, remedy="add the scales again"
        ) from error
    config = with_section(plan.config, section)
    return replace(plan, shards=(*plan.shards, shard), config=config)


def with_section(config: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """A config whose ``quantization_config``, wherever it stands, says this too."""
    changed = copy.deepcopy(dict(config))
    parent, declared = quantization_section(changed)
    place = changed if parent is None else changed[parent]
    place["quantization_config"] = {**declared, **section}
    return changed
