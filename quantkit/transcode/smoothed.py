"""The error of INT4 whose source was multiplied before, each row or each column by a number that is not stored.

AWQ divides a row of one matrix and multiplies the column that reads it in the next. The number that comes closest is
found again by least squares; what is then left is the error of the codes.
Suffixes: ``R`` rows, ``C`` columns, ``G`` groups along C.
"""

import numpy as np
from numpy.typing import NDArray

from quantkit.codecs.int4_group import Int4Group
from quantkit.numerics import metrics
from quantkit.numerics.bfloat16 import to_float32
from quantkit.numerics.packing import Int4Words, unpack_int4
from quantkit.transcode.rows import Rows

_BLOCK = 256  # rows in float64 at a time


def smoothed_sums(rows: Rows, words: Int4Words, scheme: Int4Group) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Per row, the squared error and the squared weight, as ``metrics.error_rows`` of the source times its factors.

    Smoothed columns need all rows of the weight. No factor is negative: a weight turned round is all error.
    """
    source_RC = rows.weight.codec.decode(rows.parts, rows.first_row)
    codes_RC = unpack_int4(words.packed, rows.weight.num_cols)
    blocks = [slice(first, first + _BLOCK) for first in range(0, len(source_RC), _BLOCK)]
    if scheme.smoothed == "columns":
        assert len(source_RC) == rows.weight.num_rows, rows.weight.name
        products_C = np.zeros((2, rows.weight.num_cols))
        for block in blocks:
            products_C += _products(source_RC[block], codes_RC[block], words.scale[block], scheme.group_size).sum(1)
        factors = [_factor(*products_C)] * len(blocks)
    else:
        factors = [
            _factor(*_products(source_RC[block], codes_RC[block], words.scale[block], scheme.group_size).sum(-1))[
                :, None
            ]
            for block in blocks
        ]
    sums = [
        metrics.error_rows(source_RC[block] * factor, codes_RC[block], words.scale[block], scheme.group_size)
        for block, factor in zip(blocks, factors, strict=True)
    ]
    error2_R, weight2_R = (np.concatenate(part) for part in zip(*sums, strict=True))
    return error2_R, weight2_R


def _products(
    source_RC: NDArray[np.float32], codes_RC: NDArray[np.int8], scale_RG: NDArray[np.uint16], group_size: int
) -> NDArray[np.float64]:
    """[2, R, C]: source times decoded, and source times source."""
    wide_RC = source_RC.astype(np.float64)
    decoded_RC = codes_RC * np.repeat(to_float32(scale_RG).astype(np.float64), group_size, axis=1)
    return np.stack([wide_RC * decoded_RC, wide_RC * wide_RC])


def _factor(with_decoded: NDArray[np.float64], with_itself: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 where the source is zero."""
    is_zero = with_itself == 0
    return np.where(is_zero, 1.0, np.maximum(with_decoded, 0.0) / np.where(is_zero, 1.0, with_itself))
