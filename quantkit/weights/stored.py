"""How the tensors of an architecture lie in a checkpoint of a given source form."""

from collections.abc import Iterable, Iterator

from quantkit.codecs.fp8_block import Fp8Block
from quantkit.families.family import ExpectedTensor, Role
from quantkit.layouts import compressed_tensors as ct
from quantkit.tensors import BF16, F8_E4M3, F32, I32, TensorSpec
from quantkit.weights.source_form import SourceForm


def stored_specs(expected: Iterable[ExpectedTensor], form: SourceForm) -> Iterator[tuple[str, TensorSpec]]:
    """Stored name and spec of every tensor: FP8 blocks in DeepSeek's names, native INT4 as Kimi publishes it."""
    for tensor in expected:
        module = tensor.name.removesuffix(".weight")
        if form.int4_group_size is not None and tensor.role is Role.ROUTED_EXPERT:
            rows, cols = tensor.shape
            yield f"{module}.{ct.PACKED}", TensorSpec(I32, (rows, cols // ct.CODES_PER_WORD))
            yield f"{module}.{ct.SCALE}", TensorSpec(BF16, (rows, cols // form.int4_group_size))
            # the vendor writes it as I32, compressed-tensors as I64
            yield f"{module}.{ct.SHAPE}", TensorSpec(I32, (2,))
        elif form.fp8_blocks and tensor.is_fp8:
            rows, cols = tensor.shape
            block_rows, block_cols = form.block_size(rows, cols)
            grid = Fp8Block(block_rows=block_rows, block_cols=block_cols).grid_shape(rows, cols)
            yield tensor.name, TensorSpec(F8_E4M3, tensor.shape)
            yield f"{module}.weight_scale_inv", TensorSpec(F32, grid)
        else:
            yield tensor.name, TensorSpec(tensor.dtype, tensor.shape)
