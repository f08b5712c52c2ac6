"""How the tensors of an architecture lie in the published checkpoints, by form.

Forms: ``bf16``; ``fp8_block`` (DeepSeek style, 128 x 128 blocks with F32 multipliers, ragged edges included);
``int4_native`` (Kimi K2-Thinking and later: routed experts packed, the rest BF16).
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from quantkit.families.family import ExpectedTensor, Role
from quantkit.tensors import BF16, F8_E4M3, F32, I32, TensorSpec

SourceForm = Literal["bf16", "fp8_block", "int4_native"]

BLOCK = 128
NATIVE_GROUP = 32
CODES_PER_WORD = 8


def stored_specs(expected: Iterable[ExpectedTensor], form: SourceForm) -> Iterator[tuple[str, TensorSpec]]:
    """Stored name and spec of every tensor."""
    for tensor in expected:
        module = tensor.name.removesuffix(".weight")
        if form == "fp8_block" and tensor.is_linear:
            rows, cols = tensor.shape
            yield tensor.name, TensorSpec(F8_E4M3, tensor.shape)
            yield f"{module}.weight_scale_inv", TensorSpec(F32, (-(-rows // BLOCK), -(-cols // BLOCK)))
        elif form == "int4_native" and tensor.role is Role.ROUTED_EXPERT:
            rows, cols = tensor.shape
            yield f"{module}.weight_packed", TensorSpec(I32, (rows, cols // CODES_PER_WORD))
            yield f"{module}.weight_scale", TensorSpec(BF16, (rows, cols // NATIVE_GROUP))
            # the vendor writes it as I32, compressed-tensors as I64
            yield f"{module}.weight_shape", TensorSpec(I32, (2,))
        else:
            yield tensor.name, TensorSpec(tensor.dtype, tensor.shape)
