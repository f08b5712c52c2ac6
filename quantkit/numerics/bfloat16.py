"""BF16 as bit patterns in uint16: to float32, and back with one rounding, half to even."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]

MIN_NORMAL = 2.0**-126
MAX_FINITE = 255 * 2.0**120
_QUIET_NAN = np.uint16(0x7FC0)


def to_float32(bits: Bits) -> NDArray[np.float32]:
    """Exact: BF16 is the upper half of float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_float32(values: NDArray[np.float32]) -> Bits:
    """Nearest BF16, ties to even; overflows to infinity; every NaN becomes 0x7FC0."""
    assert values.dtype == np.float32, values.dtype
    word = np.ascontiguousarray(values).view(np.uint32)
    rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), _QUIET_NAN, rounded.astype(np.uint16))


def from_float64(values: NDArray[np.float64]) -> Bits:
    """As ``from_float32`` and rounded once: going through float32 would round twice."""
    _, exponent = np.frexp(values)
    # eight bits of significand; below 2**-126 the step stays that of the subnormals
    step_exponent = np.maximum(exponent - 1, -126) - 7
    steps = np.rint(np.ldexp(values, -step_exponent))
    with np.errstate(over="ignore"):
        rounded = np.ldexp(steps, step_exponent).astype(np.float32)
    upper = (np.ascontiguousarray(rounded).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), _QUIET_NAN, upper)


def first_nonfinite(values_RC: Bits | NDArray[np.float32]) -> tuple[int, int] | None:
    """Row and column of the first NaN or infinity, in row order; uint16 is BF16."""
    assert values_RC.dtype in (np.uint16, np.float32), values_RC.dtype
    num_rows, num_cols = values_RC.shape
    step = max(1, (1 << 15) // max(1, num_cols))
    for start in range(0, num_rows, step):
        bad = _is_nonfinite(values_RC[start : start + step])
        if bad.any():
            row, col = divmod(int(bad.argmax()), num_cols)
            return start + row, col
    return None


def _is_nonfinite(values: NDArray[Any]) -> NDArray[np.bool_]:
    if values.dtype == np.uint16:
        is_bad: NDArray[np.bool_] = (values & np.uint16(0x7F80)) == np.uint16(0x7F80)
    else:
        is_bad = ~np.isfinite(values)
    return is_bad
