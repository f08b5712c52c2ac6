"""A checkpoint at a glance: parts, dtypes, bytes and parameters, from headers alone and for any scheme."""

from dataclasses import dataclass

from quantkit.checkpoint.source import Checkpoint
from quantkit.families import family_of
from quantkit.families.family import Role
from quantkit.layouts import compressed_tensors as ct
from quantkit.layouts import w4afp8
from quantkit.layouts.classic import G_IDX, QWEIGHT, QZEROS, SCALES
from quantkit.numerics.packing import CODES_PER_WORD
from quantkit.tensors import F8_E8M0, I8, I32, U8, DType

_SCALES = (
    *("_scale", "_scale_inv", "_scale_2", ".scale", "_zero_point", "_shape", "_g_idx"),
    *(f".{leaf}" for leaf in (SCALES, QZEROS, G_IDX)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedPart:
    """All stored tensors of one role and dtype."""

    role: Role
    dtype: str
    num_tensors: int
    num_elements: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectReport:
    """``num_parameters`` counts weights: a packed word as eight, scales and shapes as none."""

    family: str
    model_type: str
    scheme: str
    num_shards: int
    num_tensors: int
    num_bytes: int
    num_parameters: int
    parts: tuple[InspectedPart, ...]


def inspect_checkpoint(checkpoint: Checkpoint) -> InspectReport:
    """Group every stored tensor by role and dtype, largest first."""
    family = family_of(checkpoint.config)
    totals: dict[tuple[Role, str], list[int]] = {}
    num_parameters = 0
    method = str(checkpoint.quantization.get("quant_method", ""))
    for tensor in checkpoint.tensors.values():
        total = totals.setdefault((family.role_of(tensor.name), tensor.spec.dtype.name), [0, 0, 0])
        total[0] += 1
        total[1] += tensor.spec.num_elements
        total[2] += tensor.spec.num_bytes
        num_parameters += tensor.spec.num_elements * _parameters_each(tensor.name, tensor.spec.dtype, method)
    parts = [
        InspectedPart(role=role, dtype=dtype, num_tensors=total[0], num_elements=total[1], num_bytes=total[2])
        for (role, dtype), total in totals.items()
    ]
    return InspectReport(
        family=family.name,
        model_type=str(checkpoint.config.get("model_type", "unknown")),
        scheme=describe_scheme(checkpoint),
        num_shards=len(checkpoint.shards),
        num_tensors=len(checkpoint.tensors),
        num_bytes=checkpoint.num_bytes,
        num_parameters=num_parameters,
        parts=tuple(sorted(parts, key=lambda part: (-part.num_bytes, part.role, part.dtype))),
    )


def describe_scheme(checkpoint: Checkpoint) -> str:
    """One phrase for the config's quantization section, whatever it declares."""
    section = checkpoint.quantization
    if not section:
        return "not quantized"
    method = str(section.get("quant_method", "unknown"))
    details = [str(section[key]) for key in ("format", "fmt", "quant_algo") if section.get(key)]
    if section.get("weight_block_size"):
        details.append(f"blocks {section['weight_block_size']}")
    groups = section.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        weights = weights if isinstance(weights, dict) else {}
        kind = f"{weights.get('type')}{weights.get('num_bits')}"
        kind = f"{'asymmetric ' if weights.get('symmetric') is False else ''}{kind}"
        details.append(f"{kind} {weights.get('strategy')} {weights.get('group_size') or ''}".strip())
        if isinstance(group, dict) and group.get("input_activations") and kind.endswith("int4"):
            details.append("activations quantized")
    if section.get("linear_fp8_config"):
        details.append("native FP8 Linears")
    if section.get("group_size"):
        details.append(f"groups of {section['group_size']}")
    return f"{method} ({', '.join(details)})" if details else method


def _parameters_each(name: str, dtype: DType, method: str) -> int:
    """Weights that an element of a tensor stands for."""
    if name.endswith(("." + ct.PACKED, "." + QWEIGHT)):
        return CODES_PER_WORD if dtype == I32 else 2
    if name.endswith(_SCALES) or dtype == F8_E8M0:
        return 0
    return 2 if method == w4afp8.METHOD and dtype in (I8, U8) else 1
