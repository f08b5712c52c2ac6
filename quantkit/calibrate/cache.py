"""What the KV cache would hold: histograms of magnitudes, a row for each head or tile.

Legend: T tokens, H heads, D head size, R rows (heads, tiles of 128 latent channels, or one), B bins.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.numerics.magnitudes import NUM_BINS, bins_of
from quantkit.statistics.file import Array
from quantkit.statistics.names import HISTOGRAM, LARGEST, TILE, KvPart


@dataclass(slots=True)
class MagnitudeCounts:
    """Of one part of one layer's cache."""

    histogram_RB: NDArray[np.int64]
    largest_R: NDArray[np.float32]

    def add(self, row: int, values: NDArray[np.float32]) -> None:
        """Some values of a row more."""
        self.histogram_RB[row] += np.bincount(bins_of(values).reshape(-1), minlength=NUM_BINS)
        self.largest_R[row] = max(self.largest_R[row], np.abs(values).max(initial=0))


def rows_of(part: KvPart, values_THD: Tensor) -> list[NDArray[np.float32]]:
    """Values of each row: of each head, or, of the latent, of each tile of 128 channels."""
    values = values_THD.float().cpu()
    is_latent = part is KvPart.LATENT
    pieces = torch.split(values.reshape(len(values), -1), TILE, dim=1) if is_latent else values.unbind(1)
    return [np.ascontiguousarray(piece.numpy()) for piece in pieces]


def magnitude_counts(num_rows: int) -> MagnitudeCounts:
    """Of nothing yet."""
    return MagnitudeCounts(
        histogram_RB=np.zeros((num_rows, NUM_BINS), np.int64), largest_R=np.zeros(num_rows, np.float32)
    )


def cache_arrays(attention: str, part: KvPart, counts: MagnitudeCounts) -> dict[str, Array]:
    """Tensors of a statistics file."""
    return {
        f"{attention}.{part}{HISTOGRAM}": counts.histogram_RB,
        f"{attention}.{part}{LARGEST}": counts.largest_R,
    }
