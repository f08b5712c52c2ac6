"""Parts that are carried over byte for byte and never decoded: integers, booleans, and native INT4."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.codecs.codec import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """Bytes."""

    @property
    def name(self) -> str:
        return "opaque"

    def problem(self, parts: Parts, first_row: int) -> str | None:
        """Nothing is known, so nothing can be wrong."""
        return None

    def decode(self, parts: Parts, first_row: int) -> NDArray[np.float32]:
        """Never called: the planner only copies such weights."""
        raise AssertionError("an opaque weight has no values")


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeInt4(Opaque):
    """INT4 that the source holds already, in groups of ``group_size`` columns: never requantized.

    ``layout``: how it lies. ``zero_offset``: what is added to a stored zero point (1 in the first GPTQ format).
    """

    group_size: int
    layout: str = "compressed-tensors"
    is_symmetric: bool = True
    zero_offset: int = 0

    @property
    def name(self) -> str:
        return "native_int4"
