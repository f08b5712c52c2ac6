"""INT4 as a checkpoint holds it -> words in no layout: the same codes and scales, checked. Nothing is computed anew.

Legend: R rows, G groups along the columns.
"""

from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.reader import read_tensor
from quantkit.codecs.opaque import NativeInt4
from quantkit.errors import RecipeError
from quantkit.layouts import READERS
from quantkit.layouts.classic import ZeroPointError
from quantkit.numerics import bfloat16
from quantkit.numerics.packing import CODES_PER_WORD, Int4Words
from quantkit.recipe_settings import W4A8_REMEDY
from quantkit.tensors import BF16
from quantkit.transcode.rows import check_shape_tensor
from quantkit.weights.weight import Weight

_SOURCE_REMEDY = "convert the FP8 or BF16 source instead"


def has_row_blocks(codec: NativeInt4) -> bool:
    """Whether some rows can be read without the others."""
    return READERS[codec.layout].has_row_blocks


def read_words(weight: Weight, first_row: int, last_row: int, *, signed: bool) -> Int4Words:
    """Rows ``[first_row, last_row)``, whole words of eight where there are zero points.

    Raises SourceError for parts that cannot be meant, RecipeError for what no other layout keeps, and for a scale below
    zero unless ``signed``.
    """
    codec = cast(NativeInt4, weight.codec)
    reader = READERS[codec.layout]
    parts = {part: tensor for part, tensor in weight.parts.items() if part in ("packed", "scale", "zero")}
    if reader.has_row_blocks:
        parts = {part: _rows_of(tensor, weight, first_row, last_row) for part, tensor in parts.items()}
    else:
        assert (first_row, last_row) == (0, weight.num_rows)
    if first_row == 0:
        _check_beside(weight, codec)
    try:
        words = reader.to_words({part: read_tensor(tensor) for part, tensor in parts.items()})
    except ZeroPointError as error:
        _refuse(weight, "zero", str(error), _SOURCE_REMEDY)
    _check_scales(weight, words.scale, first_row, signed=signed)
    return words._replace(zero=_checked_zero(weight, codec, words.zero))


def _refuse(weight: Weight, part: str, message: str, remedy: str) -> NoReturn:
    raise RecipeError(message, tensor=weight.parts[part].name, file=weight.stored.path.name, remedy=remedy)


def _checked_zero(weight: Weight, codec: NativeInt4, zero_RG: NDArray[np.int8] | None) -> NDArray[np.int8] | None:
    """None of a symmetric weight, whose stored zero points must all be in the middle."""
    if codec.is_symmetric and zero_RG is not None and zero_RG.any():
        weight.fail(
            f"config.json denies zero points, and those of {weight.parts['zero'].name} are not in the middle",
            remedy="correct config.json, or download it again",
        )
    return None if codec.is_symmetric else zero_RG


def _check_beside(weight: Weight, codec: NativeInt4) -> None:
    """What is stored once for a weight: its shape, and the order of its columns, which must be that of their groups."""
    if "shape" in weight.parts:
        check_shape_tensor(weight, read_tensor(weight.parts["shape"]))
    if "order" in weight.parts:
        order_C = read_tensor(weight.parts["order"])
        if not np.array_equal(order_C, np.arange(weight.num_cols) // codec.group_size):
            what = "its columns are quantized in another order (desc_act), which no other layout keeps"
            _refuse(weight, "order", what, _SOURCE_REMEDY)


def _rows_of(tensor: StoredTensor, weight: Weight, first_row: int, last_row: int) -> StoredTensor:
    """Of a part that has as many rows as the weight, or, of zero points, one for eight."""
    rows_each = CODES_PER_WORD if tensor is weight.parts.get("zero") else 1
    return tensor.rows(first_row // rows_each, -(-last_row // rows_each))


def _check_scales(weight: Weight, scale_RG: NDArray[Any], first_row: int, *, signed: bool) -> None:
    stored = weight.parts["scale"]
    values = bfloat16.to_float32(scale_RG) if stored.spec.dtype == BF16 else scale_RG
    wrong = ~np.isfinite(values) | (values == 0)
    if wrong.any():
        row, group = np.argwhere(wrong)[0]
        weight.fail(f"holds {values[row, group]} for row {first_row + row}, group {group}", part="scale")
    if not signed and (values < 0).any():
        what = "has scales below zero, and kernels for FP8 activations are not known to read such"
        _refuse(weight, "scale", what, W4A8_REMEDY)
