"""Split experts that are stored as one 3-D tensor into the per-expert weights that engines load.

Stored [expert, out, in]; ``gate_up_proj`` stacks gate above up. Each part is a contiguous run of the same bytes, so
that fused and per-expert checkpoints give the same output.
"""

from collections.abc import Iterator, Mapping

from quantkit.checkpoint.header import StoredTensor
from quantkit.codecs.codec import Codec
from quantkit.codecs.float_values import FloatValues
from quantkit.codecs.fp8_block import Fp8Block
from quantkit.errors import SourceError
from quantkit.families.config_values import MOST_EXPERTS
from quantkit.module_names import expert_of
from quantkit.weights.weight import Weight


def is_fused_expert(tensor: StoredTensor, projections: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether a tensor holds all experts of a layer."""
    if len(tensor.spec.shape) != 3:
        return False
    expert = expert_of(tensor.name.removesuffix(".weight"))
    return expert is not None and expert.number is None and expert.rest in projections


def split_fused(
    tensor: StoredTensor,
    scale: StoredTensor | None,
    block: tuple[int, int] | None,
    projections: Mapping[str, tuple[str, ...]],
    tensors: Mapping[str, StoredTensor],
) -> Iterator[Weight]:
    """One weight for each expert and projection, named ``....experts.E.gate_proj.weight``."""
    parent, _, leaf = tensor.name.removesuffix(".weight").rpartition(".")
    leaves = projections[leaf]
    num_experts, rows, cols = tensor.spec.shape
    _check_orientation(tensor, leaves, parent, projections, tensors)
    if not 0 < num_experts <= MOST_EXPERTS or 0 in tensor.spec.shape:
        raise SourceError(
            f"of shape {list(tensor.spec.shape)} does not hold 1 to {MOST_EXPERTS} experts",
            tensor=tensor.name,
            file=tensor.path.name,
            remedy="download this shard again",
        )
    part_rows = rows // len(leaves)
    for expert in range(num_experts):
        for position, part_leaf in enumerate(leaves):
            first = position * part_rows
            module = f"{parent}.{expert}.{part_leaf}"
            codes = tensor.item(expert, name=tensor.name).rows(first, first + part_rows, name=f"{module}.weight")
            parts = {"values": codes}
            codec: Codec = FloatValues(dtype=tensor.spec.dtype)
            if scale is not None and block is not None:
                scale_first, row_offset = divmod(first, block[0])
                scale_last = -(-(first + part_rows) // block[0])
                one_scale = scale.item(expert, name=scale.name)
                one_scale = one_scale.rows(scale_first, scale_last, name=f"{module}.weight_scale_inv")
                parts = {"codes": codes, "scale": one_scale}
                codec = Fp8Block(block_rows=block[0], block_cols=block[1], row_offset=row_offset)
            yield Weight(
                name=f"{module}.weight", shape=(part_rows, cols), codec=codec, main=next(iter(parts)), parts=parts
            )


def _check_orientation(
    tensor: StoredTensor,
    leaves: tuple[str, ...],
    parent: str,
    projections: Mapping[str, tuple[str, ...]],
    tensors: Mapping[str, StoredTensor],
) -> None:
    """Stored [expert, in, out] would convert without an error and serve garbage: the sister tensor tells."""
    num_experts, rows, cols = tensor.spec.shape
    for other_leaf, other_leaves in projections.items():
        sister = tensors.get(f"{parent}.{other_leaf}") or tensors.get(f"{parent}.{other_leaf}.weight")
        if sister is None or len(other_leaves) == len(leaves) or len(sister.spec.shape) != 3:
            continue
        other_experts, other_rows, other_cols = sister.spec.shape
        width, other_width = rows // len(leaves), other_rows // len(other_leaves)
        if (num_experts, width, cols) != (other_experts, other_cols, other_width) or rows % len(leaves):
            raise SourceError(
                f"of shape {list(tensor.spec.shape)} does not fit {sister.name} {list(sister.spec.shape)}: experts "
                "must be stored [expert, out, in]",
                tensor=tensor.name,
                file=tensor.path.name,
                remedy="transpose the experts, or store them one by one",
            )
        return
    raise SourceError(
        "holds fused experts, but the other projection of the same experts is missing",
        tensor=tensor.name,
        file=tensor.path.name,
        remedy="download the shard that holds it",
    )
