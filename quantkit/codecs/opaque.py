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

    ``layout``: how it lies, by the name of a reader.
    """

    group_size: int
    layout: str = "compressed-tensors"
    is_symmetric: bool = True

    @property
    def name(self) -> str:
        return "native_int4"
