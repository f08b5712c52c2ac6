"""BF16 by its bits: exact on a GPU and in the interpreter, whose own BF16 arithmetic and casts are wrong."""

import triton
import triton.language as tl


@triton.jit
def bf16_word(values):  # type: ignore[no-untyped-def]
    """The nearest BF16 of float32 values, ties to even, in the upper half of each int32. No NaN."""
    word = values.to(tl.int32, bitcast=True)
    return (word + 0x7FFF + ((word >> 16) & 1)) & -65536


@triton.jit
def widen_bf16(values):  # type: ignore[no-untyped-def]
    """BF16 as float32."""
    return (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_values(source_ptr, offsets, mask):  # type: ignore[no-untyped-def]
    """BF16, FP16 or float32 as float32."""
    values = tl.load(source_ptr + offsets, mask=mask, other=0.0)
    if source_ptr.dtype.element_ty == tl.bfloat16:
        wide = widen_bf16(values)
    else:
        wide = values.to(tl.float32)
    return wide
