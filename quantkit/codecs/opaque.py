"""Tensors that are carried over byte for byte and never decoded: integers, booleans, packed native INT4."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.codecs.weight import Parts, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """Bytes."""

    @property
    def name(self) -> str:
        return "opaque"

    def check_values(self, weight: Weight, parts: Parts, first_row: int) -> None:
        """Nothing is known, so nothing is checked."""

    def check_scale(self, weight: Weight, parts: Parts, first_row: int) -> None:
        """There is none."""

    def decode(self, parts: Parts, first_row: int) -> NDArray[np.float32]:
        """Never called: the planner only copies such tensors."""
        raise AssertionError("an opaque tensor has no values")
