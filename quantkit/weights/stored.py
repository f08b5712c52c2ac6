"""How the tensors of an architecture lie in a checkpoint of a given source form."""

from collections.abc import Iterable, Iterator

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.codecs.fp8_block import Fp8Block
from quantkit.codecs.int4_group import Int4Group
from quantkit.errors import SourceError
from quantkit.families.family import ExpectedTensor, Role
from quantkit.layouts import LAYOUTS
from quantkit.tensors import F8_E4M3, F32, I32, DType, TensorSpec
from quantkit.weights.source_form import SourceForm

WEIGHT = "weight"


def is_quantizable(leaf: str, spec: TensorSpec) -> bool:
    """Whether it may be the matrix of a Linear: what else a module holds is stored as it is in every form."""
    return leaf == WEIGHT and len(spec.shape) == 2


def stored_leaves(
    leaf: str, spec: TensorSpec, form: SourceForm, *, role: Role, is_fp8: bool, shape_dtype: DType = I32
) -> Iterator[tuple[str, TensorSpec]]:
    """Leaf name and spec of the tensors that ``leaf`` of a module becomes; itself where it is not quantized.

    FP8 blocks in DeepSeek's names, native INT4 as Kimi publishes it: its ``weight_shape`` is I32, where
    compressed-tensors writes I64.
    """
    if not is_quantizable(leaf, spec):
        yield leaf, spec
    elif form.int4_group_size is not None and role is Role.ROUTED_EXPERT:
        yield from _int4_leaves(spec, form, shape_dtype)
    elif form.fp8_blocks and is_fp8:
        rows, cols = spec.shape
        block_rows, block_cols = form.block_size(rows, cols)
        yield WEIGHT, TensorSpec(F8_E4M3, spec.shape)
        grid = Fp8Block(block_rows=block_rows, block_cols=block_cols).grid_shape(rows, cols)
        yield "weight_scale_inv", TensorSpec(F32, grid)
    else:
        yield leaf, spec


def _int4_leaves(spec: TensorSpec, form: SourceForm, shape_dtype: DType) -> Iterator[tuple[str, TensorSpec]]:
    """Raises SourceError for a layout that is only read from headers."""
    assert form.int4_group_size is not None
    if form.int4_layout not in LAYOUTS:
        raise SourceError(
            f"which tensors a {form.int4_layout} checkpoint holds is not known from its config alone",
            file=CONFIG_NAME,
            remedy="name the checkpoint directory",
        )
    rows, cols = spec.shape
    scheme = Int4Group(group_size=form.int4_group_size, zero_points=not form.is_symmetric)
    for part, stored in LAYOUTS[form.int4_layout].stored(scheme, rows, cols).items():
        yield stored.leaf, TensorSpec(shape_dtype, stored.spec.shape) if part == "shape" else stored.spec


def stored_specs(expected: Iterable[ExpectedTensor], form: SourceForm) -> Iterator[tuple[str, TensorSpec]]:
    """Stored name and spec of every tensor."""
    for tensor in expected:
        module, _, leaf = tensor.name.rpartition(".")
        spec = TensorSpec(tensor.dtype, tensor.shape)
        for stored_leaf, stored in stored_leaves(leaf, spec, form, role=tensor.role, is_fp8=tensor.is_fp8):
            yield f"{module}.{stored_leaf}", stored
