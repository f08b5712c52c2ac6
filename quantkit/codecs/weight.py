"""A logical weight and the stored parts it is made of.

A codec is the arithmetic of one storage format: it knows neither names nor files. Legend: R rows (out), C columns
(in); a weight of any other rank counts as one whose last dimension is C.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.header import StoredTensor
from quantkit.errors import SourceError

Array = NDArray[Any]
Parts = Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """``name`` is the logical name (``....gate_proj.weight``), ``parts`` where its stored tensors lie.

    The part called ``main`` has the weight's rows; every other part is small and read whole.
    """

    name: str
    shape: tuple[int, ...]
    codec: "Codec"
    main: str
    parts: Mapping[str, StoredTensor]

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def num_rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def num_cols(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        return sum(part.spec.num_bytes for part in self.parts.values())

    @property
    def stored(self) -> StoredTensor:
        return self.parts[self.main]

    def fail(self, message: str, *, remedy: str = "download this shard again") -> NoReturn:
        """Raise a SourceError that names this weight's tensor and file."""
        raise SourceError(message, tensor=self.stored.name, file=self.stored.path.name, remedy=remedy)


class Codec(Protocol):
    """What every storage format can do with a block of rows of one weight."""

    @property
    def name(self) -> str: ...

    def check_values(self, weight: Weight, parts: Parts, first_row: int) -> None:
        """Raise SourceError for NaN and Inf, with the position."""

    def check_scale(self, weight: Weight, parts: Parts, first_row: int) -> None:
        """Raise SourceError for a scale that cannot be meant."""

    def decode(self, parts: Parts, first_row: int) -> NDArray[np.float32]:
        """Values of the rows that ``parts`` holds; ``first_row`` is their place in the weight."""
