"""INT4 with one BF16 multiplier per group of columns: the target of a conversion.

Codes -8..7, symmetric. Legend: R rows, C columns, G groups along C.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics import absmax, bfloat16, grid, search
from quantkit.numerics.scale_choice import ScaleChoice

Encoded = tuple[NDArray[np.int8], NDArray[np.uint16]]  # codes_RC, scale_RG


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Group:
    """How weights become INT4: the group along the columns, how scales are chosen, whether they may be negative."""

    group_size: int
    scales: ScaleChoice = "search"
    signed: bool = True
    zero_points: bool = False

    @property
    def name(self) -> str:
        return "int4_group"

    def encode_values(self, values_RC: NDArray[np.float32]) -> Encoded:
        """Codes and BF16 scales of decoded weights."""
        if self.scales == "absmax":
            return absmax.quantize_absmax(bfloat16.from_float32(values_RC), group_size=self.group_size)
        return self.encode_grid(*grid.value_grid(values_RC, group_size=self.group_size))

    def encode_grid(self, ints_RC: NDArray[np.int32], unit_RG: NDArray[np.float64]) -> Encoded:
        """Codes and BF16 scales of weights on an integer grid (scale search only)."""
        assert self.scales == "search", self.scales
        return search.quantize_search(ints_RC, unit_RG, group_size=self.group_size, signed=self.signed)
