"""What a consumer wants stored for an INT4 weight: leaf names, specs, packing, and the config section.

Legend: R rows, C columns, G groups along C.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.codecs.int4_group import Int4Group
from quantkit.registry import Registry
from quantkit.tensors import TensorSpec

Stored = Mapping[str, NDArray[Any]]  # stored part to array


@dataclass(frozen=True, slots=True)
class StoredPart:
    """``leaf`` stands behind the module's name. ``has_rows``: the part has the weight's rows as its first dimension."""

    leaf: str
    spec: TensorSpec
    has_rows: bool = True


class Layout(Protocol):
    """A value in ``LAYOUTS``. Codes are int8 [R, C], scales BF16 bits [R, G]."""

    @property
    def name(self) -> str: ...

    def stored(self, scheme: Int4Group, num_rows: int, num_cols: int) -> Mapping[str, StoredPart]:
        """Every stored part of one weight, before any data is read."""

    def pack(self, codes_RC: NDArray[np.int8], scale_RG: NDArray[np.uint16]) -> Stored:
        """The parts that have rows, of a block of rows."""

    def unpack(self, stored: Stored, num_cols: int) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
        """Codes and scales of what ``pack`` made."""

    def constants(self, num_rows: int, num_cols: int) -> Stored:
        """The parts that do not depend on the data."""

    def config_section(
        self, scheme: Int4Group, ignore: Sequence[str], fp8_targets: Sequence[str] = ()
    ) -> dict[str, Any]:
        """``quantization_config`` of a checkpoint whose INT4 Linears all share one scheme; ``fp8_targets``: entries
        that hit those in FP8 blocks."""

    def targets(
        self,
        modules: Iterable[str],
        *,
        others: Iterable[str],
        patterns: Sequence[str],
        fused: Mapping[str, Sequence[str]],
    ) -> list[str]:
        """Config entries that hit the modules and none of ``others``, of ``patterns`` where they do."""

    def ignore_list(
        self,
        *,
        unquantized: Sequence[str],
        quantized: Iterable[str],
        patterns: Sequence[str],
        fused: Mapping[str, Sequence[str]],
    ) -> list[str]:
        """Config entries that hit every unquantized Linear and no quantized one."""


LAYOUTS: Registry[Layout] = Registry("layout")
