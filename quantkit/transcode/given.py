"""INT4 whose words something else has chosen: they are read, and compared with the source as any others."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.codecs.int4_group import Int4Group
from quantkit.transcode.devices import ChooseKernels, RowKernels
from quantkit.transcode.kernels import Quantized, kernels_for
from quantkit.transcode.rows import Rows
from quantkit.weights.weight import Weight
from quantkit.words import Words


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenKernels:
    """Of one weight whose words are there. ``others``: what would compute without them."""

    words: Words
    others: RowKernels

    def to_bf16(self, rows: Rows) -> NDArray[np.uint16]:
        return self.others.to_bf16(rows)

    def quantize(self, rows: Rows, scheme: Int4Group) -> Quantized:
        """No time is the encoder's. Raises SourceError for a scale that cannot be."""
        last_row = rows.first_row + len(rows.parts[rows.weight.main])
        words = self.words.read(rows.weight.module, rows.first_row, last_row, signed=scheme.signed)
        sums = kernels_for(rows.weight, scheme).row_sums(rows, words, scheme)
        return Quantized(words=words, sums=sums, encode_seconds=0.0, is_given=True)


def with_words(choose_kernels: ChooseKernels, words: Words | None) -> ChooseKernels:
    """Kernels that take the words of the modules that have any; calibration saw no input of the others."""
    if words is None:
        return choose_kernels
    modules = words.modules

    def choose(weight: Weight, scheme: Int4Group | None) -> RowKernels:
        others = choose_kernels(weight, scheme)
        if scheme is None or weight.module not in modules:
            return others
        return GivenKernels(words=words, others=others)

    return choose
