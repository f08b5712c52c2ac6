"""INT4 with one BF16 multiplier per group of columns: the target of a conversion.

Codes -8..7. Legend: R rows, C columns, G groups along C.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics import absmax, bfloat16, grid, min_max, search, zero_points
from quantkit.numerics.scale_choice import ScaleChoice


class Encoded(NamedTuple):
    """Codes int8 [R, C], BF16 scales [R, G], and the code of zero in each group, int8 [R, G], where that is not 0."""

    codes_RC: NDArray[np.int8]
    scale_RG: NDArray[np.uint16]
    zero_RG: NDArray[np.int8] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Group:
    """How weights become INT4: the group along the columns, how scales are chosen, whether they may be negative.

    ``zero_points``: each group has a code that stands for zero; scales are positive then. ``smoothed``: calibration has
    multiplied each row, or each column, by a number of its own before.
    """

    group_size: int
    scales: ScaleChoice = "search"
    signed: bool = True
    zero_points: bool = False
    smoothed: Literal["rows", "columns"] | None = None

    @property
    def name(self) -> str:
        return "int4_zero" if self.zero_points else "int4_group"

    def encode_values(self, values_RC: NDArray[np.float32], importance_C: NDArray[np.uint16] | None = None) -> Encoded:
        """Of decoded weights; ``importance_C``, for the search: from ``search.importance_levels``."""
        if self.scales == "absmax":
            quantize = min_max.quantize_min_max if self.zero_points else absmax.quantize_absmax
            return Encoded(*quantize(bfloat16.from_float32(values_RC), group_size=self.group_size))
        return self.encode_grid(*grid.value_grid(values_RC, group_size=self.group_size), importance_C)

    def encode_grid(
        self, ints_RC: NDArray[np.int32], unit_RG: NDArray[np.float64], importance_C: NDArray[np.uint16] | None = None
    ) -> Encoded:
        """Of weights on an integer grid (scale search only)."""
        assert self.scales == "search", self.scales
        options: dict[str, Any] = {"group_size": self.group_size, "importance_C": importance_C}
        if self.zero_points:
            return Encoded(*zero_points.quantize_search(ints_RC, unit_RG, **options))
        return Encoded(*search.quantize_search(ints_RC, unit_RG, signed=self.signed, **options))
