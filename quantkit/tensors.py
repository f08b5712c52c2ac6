"""The dtype table, and what is known of a tensor before its data is read.

FP8, BF16 and E8M0 have no numpy type: their bit patterns travel as unsigned integers.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """``name`` is the safetensors spelling, ``numpy`` the array type that carries the bits, ``bits`` per element.

    There is one of each, also behind a pickle: planning compares them by the million.
    """

    name: str
    numpy: str
    bits: int

    @property
    def num_bytes(self) -> int:
        return self.bits // 8

    def __reduce__(self) -> str:
        return self.name  # pickle's word for a value of this module


F64 = DType("F64", "<f8", 64)
F32 = DType("F32", "<f4", 32)
F16 = DType("F16", "<f2", 16)
BF16 = DType("BF16", "<u2", 16)
F8_E4M3 = DType("F8_E4M3", "|u1", 8)
F8_E5M2 = DType("F8_E5M2", "|u1", 8)
F8_E8M0 = DType("F8_E8M0", "|u1", 8)
I64 = DType("I64", "<i8", 64)
I32 = DType("I32", "<i4", 32)
I16 = DType("I16", "<i2", 16)
I8 = DType("I8", "|i1", 8)
U64 = DType("U64", "<u8", 64)
U32 = DType("U32", "<u4", 32)
U16 = DType("U16", "<u2", 16)
U8 = DType("U8", "|u1", 8)
BOOL = DType("BOOL", "|u1", 8)

DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        *(F64, F32, F16, BF16, F8_E4M3, F8_E5M2, F8_E8M0),
        *(I64, I32, I16, I8, U64, U32, U16, U8, BOOL),
    )
}


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of a tensor as stored. Without slots: many tensors share one, which remembers its size."""

    dtype: DType
    shape: tuple[int, ...]

    @cached_property
    def num_elements(self) -> int:
        return prod(self.shape)

    @cached_property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.num_bytes

    def __str__(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]"
