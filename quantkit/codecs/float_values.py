"""Plain floats: BF16, FP16 and FP32, decoded by widening. Part: ``values`` [R, C]."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.codecs.codec import Parts
from quantkit.numerics import bfloat16
from quantkit.tensors import BF16, F16, DType


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatValues:
    """``dtype`` is BF16, F16 or F32."""

    dtype: DType

    @property
    def name(self) -> str:
        return "float_values"

    def problem(self, parts: Parts, first_row: int) -> str | None:
        """NaN and Inf."""
        values = parts["values"]
        bad = bfloat16.first_nonfinite(values if self.dtype == BF16 else values.astype(np.float32))
        if bad is None:
            return None
        return f"holds {self.decode(parts, first_row)[bad]} at row {first_row + bad[0]}, column {bad[1]}"

    def decode(self, parts: Parts, first_row: int) -> NDArray[np.float32]:
        """float32 of the same value."""
        values = parts["values"]
        return bfloat16.to_float32(values) if self.dtype == BF16 else values.astype(np.float32)


HALF = FloatValues(dtype=F16)
