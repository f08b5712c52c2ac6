"""What every storage format can do with a block of rows of one weight: arithmetic, no names and no files.

Legend: R rows (out), C columns (in). ``parts`` are arrays by part name; the first row that they hold is
``first_row`` of the weight.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Parts = Mapping[str, Array]


class Codec(Protocol):
    """A frozen value: the format with its parameters."""

    @property
    def name(self) -> str: ...

    def problem(self, parts: Parts, first_row: int) -> str | None:
        """What is wrong with these numbers, and where: NaN, Inf, scales that cannot be meant."""

    def decode(self, parts: Parts, first_row: int) -> NDArray[np.float32]:
        """float32 [R, C]."""
