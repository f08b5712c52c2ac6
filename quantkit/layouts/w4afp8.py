"""SGLang's `w4afp8`: INT4 experts in groups of 128 for FP8 activations, every other Linear in native FP8 blocks.

An expert's weight [R, C] is stored as ``weight`` int8 [R, C/2] and ``weight_scale_inv`` BF16 [R, C/128]: two signed
nibbles a byte, the even column in the lower one; ``w = code * scale``. That is the byte of compressed-tensors with the
top bit of both nibbles turned round. Source: SGLang 0.5.23 (`srt/layers/quantization/w4afp8.py`).
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from quantkit.codecs.int4_group import Int4Group
from quantkit.layouts.layout import LAYOUTS, READERS, Declared, Stored, StoredPart
from quantkit.numerics.packing import Int4Words
from quantkit.tensors import BF16, I8, DType, TensorSpec

WEIGHT, SCALE, INPUT_SCALE = "weight", "weight_scale_inv", "input_scale"
METHOD = "w4afp8"
GROUP_SIZE = 128  # fixed in the kernel
_TOP_BITS = np.uint8(0x88)


class W4AFp8:
    """Parts: ``packed``, ``scale``."""

    name = METHOD
    has_row_blocks = True

    @lru_cache(maxsize=1024)  # noqa: B019  (there is one layout of a kind, for as long as the process lives)
    def stored(
        self, scheme: Int4Group, num_rows: int, num_cols: int, scale_dtype: DType = BF16
    ) -> Mapping[str, StoredPart]:
        """Two tensors."""
        assert scheme.group_size == GROUP_SIZE, scheme
        return {
            "packed": StoredPart(WEIGHT, TensorSpec(I8, (num_rows, num_cols // 2))),
            "scale": StoredPart(SCALE, TensorSpec(scale_dtype, (num_rows, num_cols // GROUP_SIZE))),
        }

    def from_words(self, words: Int4Words) -> Stored:
        """Bytes of the words, low address first, as signed nibbles."""
        assert words.zero is None
        packed = np.ascontiguousarray(words.packed).astype("<i4", copy=False).view(np.uint8) ^ _TOP_BITS
        return {"packed": packed.view(np.int8), "scale": words.scale}

    def to_words(self, stored: Stored) -> Int4Words:
        """The same turned back."""
        packed = np.ascontiguousarray(stored["packed"]).view(np.uint8) ^ _TOP_BITS
        return Int4Words(packed.view("<i4"), stored["scale"])

    def constants(self, num_rows: int, num_cols: int) -> Stored:
        """None."""
        return {}

    def config_section(self, declared: Declared) -> dict[str, Any]:
        """All else is fixed in the engine, and it reads no list of exceptions."""
        return {"quant_method": METHOD}


READERS.add(W4AFp8.name, LAYOUTS.add(W4AFp8.name, W4AFp8()))
