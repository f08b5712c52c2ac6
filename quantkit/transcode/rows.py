"""Rows of a stored weight as arrays, checked: NaN, Inf, scales that cannot be. Legend: R rows, C columns, B blocks."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.reader import read_tensor
from quantkit.codecs.codec import Array, Parts
from quantkit.codecs.fp8_block import Fp8Block, is_no_scale, scale_values
from quantkit.numerics import bfloat16
from quantkit.tensors import BF16, F16, F32, F64, TensorSpec
from quantkit.weights.weight import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Checked rows of one weight. ``first_row`` is their place in the weight, ``parts`` the arrays.

    ``importance_C``: what the search of scales weighs its columns by, from ``search.importance_levels``.
    """

    weight: Weight
    first_row: int
    parts: Parts
    importance_C: NDArray[np.uint16] | None = None

    def first(self, num_rows: int) -> "Rows":
        """The first few of these rows."""
        parts = {name: array[:num_rows] if name == self.weight.main else array for name, array in self.parts.items()}
        return replace(self, parts=parts)


def read_rows(weight: Weight, first_row: int, last_row: int) -> Rows:
    """Rows ``[first_row, last_row)`` from the file, scales as float32 blocks. Raises SourceError for bad values."""
    stored = weight.stored
    matrix = TensorSpec(stored.spec.dtype, (weight.num_rows, weight.num_cols))
    span = StoredTensor(stored.name, matrix, stored.path, stored.begin).rows(first_row, last_row)
    parts: dict[str, Array] = {weight.main: read_tensor(span)}
    if isinstance(weight.codec, Fp8Block):
        parts["scale"] = _read_scale(weight, weight.codec)
    problem = weight.codec.problem(parts, first_row)
    if problem is not None:
        weight.fail(problem)
    return Rows(weight=weight, first_row=first_row, parts=parts)


def check_copied(weight: Weight, part: str, raw: NDArray[np.uint8], first_byte: int) -> None:
    """Raise SourceError for NaN or Inf in what is carried over as it is, a native scale of zero or a wrong shape."""
    dtype = weight.parts[part].spec.dtype
    if part == "shape":
        check_shape_tensor(weight, raw.view(dtype.numpy))
    if isinstance(weight.codec, Fp8Block):
        _check_fp8(weight, part, raw, first_byte)
        return
    if dtype not in (BF16, F16, F32, F64):
        return
    bits = raw.view(dtype.numpy)
    values = bfloat16.to_float32(bits) if dtype == BF16 else bits
    wrong = ~np.isfinite(values)
    if part == "scale":
        wrong |= values == 0
    if part == "input_scale":
        wrong |= values <= 0
    if wrong.any():
        place = int(np.argmax(wrong))
        index = first_byte // dtype.num_bytes + place
        shape = weight.parts[part].spec.shape
        where = ", ".join(map(str, np.unravel_index(index, shape))) if shape else "0"
        weight.fail(f"holds {values[place]} at [{where}]", part=part)


def _check_fp8(weight: Weight, part: str, raw: NDArray[np.uint8], first_byte: int) -> None:
    """Codes and scales that stay as they are, one without the other: a scale of zero over codes is not seen."""
    stored = weight.parts[part]
    if part == "codes":
        wrong = (raw & 0x7F) == 0x7F
    else:
        bits = raw.view(stored.spec.dtype.numpy)
        values = bfloat16.to_float32(bits) if stored.spec.dtype == BF16 else bits
        wrong = is_no_scale(values)
    if wrong.any():
        index = first_byte // stored.spec.dtype.num_bytes + int(np.argmax(wrong))
        where = ", ".join(map(str, np.unravel_index(index, stored.spec.shape)))
        what = "a NaN" if part == "codes" else f"{values[int(np.argmax(wrong))]}, which is no scale,"
        weight.fail(f"holds {what} at [{where}]", part=part)


def check_shape_tensor(weight: Weight, values: Array) -> None:
    """Raise SourceError where the shape that is stored beside packed INT4 is another."""
    if values.tolist() != list(weight.shape):
        weight.fail(f"holds {values.tolist()}, but the weight is {list(weight.shape)}", part="shape")


def _read_scale(weight: Weight, codec: Fp8Block) -> NDArray[np.float32]:
    shape = codec.grid_shape(weight.num_rows, weight.num_cols)
    stored = weight.parts["scale"]
    scale_BB = scale_values(read_tensor(stored), stored.spec.dtype, shape)
    other = weight.parts.get("other_scale")
    if other is not None and not np.array_equal(scale_BB, scale_values(read_tensor(other), other.spec.dtype, shape)):
        weight.fail(
            f"carries two scales that disagree ({stored.name}, {other.name})",
            remedy="remove the one that does not multiply",
        )
    return scale_BB
