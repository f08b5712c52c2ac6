"""Plain floats: BF16, FP16 and FP32, decoded by widening."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.codecs.weight import Parts, Weight
from quantkit.numerics import bfloat16
from quantkit.tensors import BF16, DType


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatValues:
    """``dtype`` is BF16, F16 or F32."""

    dtype: DType

    @property
    def name(self) -> str:
        return "float_values"

    def check_values(self, weight: Weight, parts: Parts, first_row: int) -> None:
        """NaN and Inf."""
        values = self.decode(parts, first_row)
        if not np.isfinite(values).all():
            place = np.argwhere(~np.isfinite(values))[0]
            weight.fail(f"holds {values[tuple(place)]} at row {first_row + place[0]}, column {place[-1]}")

    def check_scale(self, weight: Weight, parts: Parts, first_row: int) -> None:
        """There is none."""

    def decode(self, parts: Parts, first_row: int) -> NDArray[np.float32]:
        """float32 of the same value."""
        values = parts["values"]
        return bfloat16.to_float32(values) if self.dtype == BF16 else values.astype(np.float32)
