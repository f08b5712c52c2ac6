"""The search on weights that are in memory already, by numba: the same bytes as the specification."""

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.packing import unpack_int4
from quantkit.numerics.search import importance_levels


def search_values(
    values_RC: NDArray[np.float32], *, group_size: int, signed: bool, moments_C: NDArray[np.float64] | None
) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
    """Codes and BF16 scales; ``moments_C``: what the columns count, where that is known."""
    from quantkit.numerics import fused_cpu

    importance_C = None if moments_C is None else importance_levels(moments_C, group_size=group_size)
    packed_RW, scale_RG = fused_cpu.quantize_values(
        values_RC, group_size=group_size, scales="search", signed=signed, importance_C=importance_C
    )
    return unpack_int4(packed_RW, values_RC.shape[1]), scale_RG
