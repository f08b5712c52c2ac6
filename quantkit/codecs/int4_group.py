"""INT4 with one BF16 multiplier per group of columns: the target of a conversion, and some sources' own format.

Codes -8..7, symmetric. Legend: R rows, C columns, G groups along C, W packed words.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quantkit.codecs.weight import Array, Parts, Weight
from quantkit.numerics import absmax, bfloat16, grid, packing, search

ScaleRule = Literal["search", "absmax"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Group:
    """How weights become INT4: the group along the columns, how scales are chosen, whether they may be negative."""

    group_size: int
    scales: ScaleRule = "search"
    signed: bool = True

    @property
    def name(self) -> str:
        return "int4_group"

    def encode_values(self, values_RC: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
        """Codes and BF16 scales of decoded weights."""
        if self.scales == "absmax":
            return absmax.quantize_absmax(bfloat16.from_float32(values_RC), group_size=self.group_size)
        return self.encode_grid(*grid.value_grid(values_RC, group_size=self.group_size))

    def encode_grid(
        self, ints_RC: NDArray[np.int32], unit_RG: NDArray[np.float64]
    ) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
        """Codes and BF16 scales of weights on an integer grid (scale search only)."""
        assert self.scales == "search", self.scales
        return search.quantize_search(ints_RC, unit_RG, group_size=self.group_size, signed=self.signed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedInt4:
    """INT4 as it lies in a checkpoint: ``packed`` int32 [R, C/8], ``scale`` [R, G]."""

    group_size: int
    num_cols: int

    @property
    def name(self) -> str:
        return "packed_int4"

    def check_values(self, weight: Weight, parts: Parts, first_row: int) -> None:
        """Every bit pattern is a code."""

    def check_scale(self, weight: Weight, parts: Parts, first_row: int) -> None:
        """Zero, NaN or Inf."""
        scale_RG = bfloat16.to_float32(parts["scale"])
        wrong_RG = ~np.isfinite(scale_RG) | (scale_RG == 0)
        if wrong_RG.any():
            row, group = np.argwhere(wrong_RG)[0]
            weight.fail(f"its scale at row {first_row + row}, group {group} is {scale_RG[row, group]}")

    def decode(self, parts: Parts, first_row: int) -> NDArray[np.float32]:
        """float32 product of code and scale."""
        return decode_int4(parts["packed"], parts["scale"], num_cols=self.num_cols, group_size=self.group_size)


def decode_int4(
    packed_RW: Array, scale_RG: NDArray[np.uint16], *, num_cols: int, group_size: int
) -> NDArray[np.float32]:
    """float32 [R, C]; the product of a 4-bit code and a BF16 scale is exact."""
    codes_RC = packing.unpack_int4(packed_RW, num_cols)
    scale_RC = np.repeat(bfloat16.to_float32(scale_RG), group_size, axis=1)[:, :num_cols]
    return codes_RC.astype(np.float32) * scale_RC
