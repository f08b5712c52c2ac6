"""What a consumer wants stored for an INT4 weight: leaf names, specs, the arrangement of codes, and the config section.

Legend: R rows, C columns, G groups along C.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from quantkit.codecs.int4_group import Int4Group
from quantkit.numerics.packing import Int4Words
from quantkit.registry import Registry
from quantkit.tensors import BF16, DType, TensorSpec

Stored = Mapping[str, NDArray[Any]]  # stored part to array


@dataclass(frozen=True, slots=True)
class StoredPart:
    """``leaf`` stands behind the module's name. ``rows_each``: rows of the weight for one of the part, 0 for none."""

    leaf: str
    spec: TensorSpec
    rows_each: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What was done with the modules whose weight is a matrix, for the config to say.

    ``plain``: Linears that are neither INT4 nor FP8; ``unasked``: those for which no engine asks the config, as
    embeddings. The patterns are tried before names; ``fused`` maps a leaf to the engines' fused leaves that contain it.
    """

    scheme: Int4Group
    int4: Sequence[str]
    fp8: Sequence[str] = ()
    plain: Sequence[str] = ()
    unasked: Sequence[str] = ()
    ignore_patterns: Sequence[str] = ()
    fp8_patterns: Sequence[str] = ()
    fused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    has_native_linears: bool = False
    has_fp8_activations: bool = False


class Reader(Protocol):
    """A value in ``READERS``: how INT4 lies in a checkpoint. ``has_row_blocks``: rows are read without the others."""

    @property
    def name(self) -> str: ...

    @property
    def has_row_blocks(self) -> bool: ...

    def to_words(self, stored: Stored) -> Int4Words:
        """Of the parts ``packed``, ``scale`` and, where there are any, ``zero``."""


class Layout(Reader, Protocol):
    """A value in ``LAYOUTS``: one that is written, too."""

    def stored(
        self, scheme: Int4Group, num_rows: int, num_cols: int, scale_dtype: DType = BF16
    ) -> Mapping[str, StoredPart]:
        """Every stored part of one weight, before any data is read."""

    def from_words(self, words: Int4Words) -> Stored:
        """The parts that have rows, of a block of rows: what ``to_words`` turns back."""

    def constants(self, num_rows: int, num_cols: int) -> Stored:
        """The parts that do not depend on the data."""

    def config_section(self, declared: Declared) -> dict[str, Any]:
        """``quantization_config`` of a checkpoint whose INT4 Linears all share one scheme."""


LAYOUTS: Registry[Layout] = Registry("layout")
READERS: Registry[Reader] = Registry("layout")
