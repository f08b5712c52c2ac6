"""INT4 as a checkpoint holds it -> words in no layout: the same codes and scales, checked. Nothing is computed anew.

Legend: R rows, G groups along the columns.
"""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.reader import read_tensor
from quantkit.codecs.opaque import NativeInt4
from quantkit.errors import RecipeError
from quantkit.layouts import LAYOUTS, classic
from quantkit.numerics import bfloat16
from quantkit.numerics.packing import CODES_PER_WORD, Int4Words
from quantkit.recipe_settings import W4A8_REMEDY
from quantkit.tensors import BF16
from quantkit.transcode.rows import check_shape_tensor
from quantkit.weights.weight import Weight


def has_row_blocks(codec: NativeInt4) -> bool:
    """Whether some rows can be read without the others."""
    return codec.layout in LAYOUTS


def read_words(weight: Weight, first_row: int, last_row: int, *, signed: bool) -> Int4Words:
    """Rows ``[first_row, last_row)``, whole words of eight where there are zero points.

    Raises SourceError for scales that cannot be meant, RecipeError for one below zero unless ``signed``.
    """
    codec = cast(NativeInt4, weight.codec)
    if has_row_blocks(codec):
        stored = {
            part: read_tensor(_rows_of(tensor, weight, first_row, last_row))
            for part, tensor in weight.parts.items()
            if part in ("packed", "scale", "zero")
        }
        words = LAYOUTS[codec.layout].to_words(stored)
        if "shape" in weight.parts and first_row == 0:
            check_shape_tensor(weight, read_tensor(weight.parts["shape"]))
    else:
        assert (first_row, last_row) == (0, weight.num_rows)
        words = _read_classic(weight, codec)
    _check_scales(weight, words.scale, first_row, signed=signed)
    return words


def _rows_of(tensor: StoredTensor, weight: Weight, first_row: int, last_row: int) -> StoredTensor:
    """Of a part that has as many rows as the weight, or, of zero points, one for eight."""
    rows_each = CODES_PER_WORD if tensor is weight.parts.get("zero") else 1
    return tensor.rows(first_row // rows_each, -(-last_row // rows_each))


def _read_classic(weight: Weight, codec: NativeInt4) -> Int4Words:
    qweight = read_tensor(weight.parts["packed"])
    scale_RG = np.ascontiguousarray(read_tensor(weight.parts["scale"]).T)
    order = weight.parts.get("order")
    if order is not None:
        _check_order(weight, read_tensor(order), codec.group_size)
    zero_RG = None
    if "zero" in weight.parts:
        qzeros = read_tensor(weight.parts["zero"])
        try:
            if codec.layout == "gptq":
                zero_RG = classic.gptq_zeros(qzeros, weight.num_rows, offset=codec.zero_offset)
            else:
                zero_RG = classic.awq_zeros(qzeros, weight.num_rows)
        except classic.ZeroPointError as error:
            raise RecipeError(
                str(error),
                tensor=weight.parts["zero"].name,
                file=weight.stored.path.name,
                remedy="convert the FP8 or BF16 source instead",
            ) from error
        if codec.is_symmetric and zero_RG.any():
            weight.fail(
                f"config.json denies zero points, and those of {weight.parts['zero'].name} are not in the middle",
                remedy="correct config.json, or download it again",
            )
    is_gptq = codec.layout == "gptq"
    packed = classic.gptq_words(qweight) if is_gptq else classic.awq_words(qweight, weight.num_rows)
    return Int4Words(packed, scale_RG, None if codec.is_symmetric else zero_RG)


def _check_order(weight: Weight, order_C: NDArray[Any], group_size: int) -> None:
    """Columns in the order of their groups, or compressed-tensors has no place for them."""
    if not np.array_equal(order_C, np.arange(weight.num_cols) // group_size):
        raise RecipeError(
            "its columns are quantized in another order (desc_act), which no other layout keeps",
            tensor=weight.parts["order"].name,
            file=weight.stored.path.name,
            remedy="convert the FP8 or BF16 source instead",
        )


def _check_scales(weight: Weight, scale_RG: NDArray[Any], first_row: int, *, signed: bool) -> None:
    stored = weight.parts["scale"]
    values = bfloat16.to_float32(scale_RG) if stored.spec.dtype == BF16 else scale_RG
    wrong = ~np.isfinite(values) | (values == 0)
    if wrong.any():
        row, group = np.argwhere(wrong)[0]
        weight.fail(f"{stored.name} holds {values[row, group]} for row {first_row + row}, group {group}")
    if not signed and (values < 0).any():
        raise RecipeError(
            "has scales below zero, and kernels for FP8 activations are not known to read such",
            tensor=stored.name,
            file=stored.path.name,
            remedy=W4A8_REMEDY,
        )
