"""Moments of one weight when it is quantized: its own row, drawn towards its layer where few tokens made it.

Nothing but the layers' averages is kept: the moments of all experts of a model are most of a gigabyte.
"""

import threading
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.source import stamp_of
from quantkit.errors import SourceError
from quantkit.importance.file import Entry, ImportanceFile
from quantkit.importance.names import Place
from quantkit.numerics.shrinkage import Moments, layer_shape, shape_of, shrunk


class MomentReader:
    """Of one file and one process, for any number of threads. ``places``: of the weights that the file speaks of.

    Raises SourceError where the file is not the one that the plan was made with.
    """

    def __init__(self, file: ImportanceFile, places: Mapping[str, Place]) -> None:
        file.check_same()
        self.file = file
        self._stamp = stamp_of(file.path)
        self._places = places
        self._layers: dict[str, Moments | None] = {}
        self._lock = threading.Lock()

    def check_unchanged(self) -> None:
        """Raise SourceError where somebody has written to the file since: what was read is a mixture of two."""
        if stamp_of(self.file.path) != self._stamp:
            raise SourceError(
                "has changed while it was read",
                file=self.file.path,
                remedy="leave the file alone, then give --no-resume to start over",
            )

    def shape(self, weight_name: str, num_cols: int) -> NDArray[np.float64] | None:
        """Shares of the moments, float64 [C]; None where nothing is known. Raises SourceError for bad numbers."""
        place = self._places.get(weight_name)
        if place is None:
            return None
        entry = self.file.entries[place.entry]
        row = place.expert or 0
        tokens = entry.tokens_of(row, num_cols)
        own_C = None if tokens == 0 else shape_of(entry.read_row(row, num_cols))
        if place.expert is None or (own_C is not None and tokens is None):
            return own_C
        layer_C = self._layer(place.entry, entry, num_cols)
        if own_C is None or layer_C is None or tokens is None:
            return layer_C
        return shrunk(own_C, layer_C, tokens)

    def _layer(self, name: str, entry: Entry, num_cols: int) -> Moments | None:
        """Computed once; where tokens are not told, every expert that saw any counts the same."""
        with self._lock:
            if name not in self._layers:
                self._layers[name] = layer_shape(_rows(entry, num_cols))
            return self._layers[name]


def _rows(entry: Entry, num_cols: int) -> Iterator[tuple[Moments, int]]:
    for row in range(entry.num_values // num_cols):
        tokens = entry.tokens_of(row, num_cols)
        yield entry.read_row(row, num_cols), 1 if tokens is None else tokens
