"""Rows of stored source parts -> rows of stored output parts; the one place that chooses reference or numba.

The composition codec -> encoder -> layout is the specification. ``FUSED_CPU`` holds optimisations that give the same
bytes in one pass; a missing key falls back. Legend: R rows, C columns, G groups, W packed words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.reader import read_tensor
from quantkit.codecs.codec import Array, Parts
from quantkit.codecs.fp8_block import Fp8Block, scale_values
from quantkit.codecs.int4_group import Int4Group
from quantkit.layouts.layout import Layout, Stored
from quantkit.numerics import bfloat16, grid, metrics
from quantkit.tensors import BF16, F16, F32, F64, TensorSpec
from quantkit.weights.weight import Weight

RowSums = tuple[NDArray[np.float64], NDArray[np.float64]]  # squared error and squared weight, of each row


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Checked rows of one weight. ``first_row`` is their place in the weight, ``parts`` the arrays."""

    weight: Weight
    first_row: int
    parts: Parts

    def first(self, num_rows: int) -> "Rows":
        """The first few of these rows."""
        parts = {name: array[:num_rows] if name == self.weight.main else array for name, array in self.parts.items()}
        return Rows(weight=self.weight, first_row=self.first_row, parts=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One implementation of what is done with rows; ``encode`` gives the layout's parts that have rows."""

    encode: Callable[[Rows, Int4Group, Layout], Stored]
    to_bf16: Callable[[Rows], NDArray[np.uint16]]
    row_sums: Callable[[Rows, Stored, Int4Group, Layout], RowSums]


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
        _check_shape_tensor(weight, raw.view(dtype.numpy))
    if dtype not in (BF16, F16, F32, F64):
        return
    bits = raw.view(dtype.numpy)
    values = bfloat16.to_float32(bits) if dtype == BF16 else bits
    wrong = ~np.isfinite(values)
    if part == "scale":
        wrong |= values == 0
    if wrong.any():
        place = int(np.argmax(wrong))
        index = first_byte // dtype.num_bytes + place
        shape = weight.parts[part].spec.shape
        where = ", ".join(map(str, np.unravel_index(index, shape))) if shape else "0"
        weight.fail(f"{weight.parts[part].name} holds {values[place]} at [{where}]")


def _check_shape_tensor(weight: Weight, values: Array) -> None:
    if values.tolist() != list(weight.shape):
        weight.fail(f"{weight.parts['shape'].name} holds {values.tolist()}, but the weight is {list(weight.shape)}")


def kernels_for(weight: Weight, layout: Layout) -> Kernels:
    """The fused kernels from this storage format into this layout, or the specification."""
    return FUSED_CPU.get((weight.codec.name, layout.name), COMPOSED)


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


def _encode(rows: Rows, scheme: Int4Group, layout: Layout) -> Stored:
    codec = rows.weight.codec
    if scheme.scales == "search" and isinstance(codec, Fp8Block):
        ints_RC, unit_RG = grid.fp8_grid(
            rows.parts["codes"], rows.parts["scale"], group_size=scheme.group_size, **_fp8_place(rows)
        )
        return layout.pack(*scheme.encode_grid(ints_RC, unit_RG))
    return layout.pack(*scheme.encode_values(codec.decode(rows.parts, rows.first_row)))


def _to_bf16(rows: Rows) -> NDArray[np.uint16]:
    if rows.weight.stored.spec.dtype == BF16:
        return cast(NDArray[np.uint16], rows.parts["values"])
    return bfloat16.from_float32(rows.weight.codec.decode(rows.parts, rows.first_row))


def _row_sums(rows: Rows, stored: Stored, scheme: Int4Group, layout: Layout) -> RowSums:
    values_RC = rows.weight.codec.decode(rows.parts, rows.first_row)
    codes_RC, scale_RG = layout.unpack(stored, rows.weight.num_cols)
    return metrics.error_rows(values_RC, codes_RC, scale_RG, group_size=scheme.group_size)


COMPOSED = Kernels(encode=_encode, to_bf16=_to_bf16, row_sums=_row_sums)


def _fp8_place(rows: Rows) -> dict[str, Any]:
    codec = cast(Fp8Block, rows.weight.codec)
    return {"block": codec.block, "row_offset": codec.row_offset + rows.first_row}


def _fp8_encode(rows: Rows, scheme: Int4Group, _: Layout) -> Stored:
    from quantkit.numerics import fused_cpu

    packed_RW, scale_RG = fused_cpu.quantize_fp8(
        rows.parts["codes"],
        rows.parts["scale"],
        group_size=scheme.group_size,
        scales=scheme.scales,
        signed=scheme.signed,
        **_fp8_place(rows),
    )
    return {"packed": packed_RW, "scale": scale_RG}


def _fp8_to_bf16(rows: Rows) -> NDArray[np.uint16]:
    from quantkit.numerics import fused_cpu

    return fused_cpu.dequantize_fp8(rows.parts["codes"], rows.parts["scale"], **_fp8_place(rows))


def _fp8_row_sums(rows: Rows, stored: Stored, scheme: Int4Group, _: Layout) -> RowSums:
    from quantkit.numerics import fused_cpu

    return fused_cpu.error_rows_fp8(
        rows.parts["codes"],
        rows.parts["scale"],
        stored["packed"],
        stored["scale"],
        group_size=scheme.group_size,
        **_fp8_place(rows),
    )


def _kernel_values(rows: Rows) -> Array:
    """BF16 bits as they are, FP16 widened: the float kernels know BF16 and FP32."""
    values: Array = rows.parts["values"]
    return values.astype(np.float32) if rows.weight.stored.spec.dtype == F16 else values


def _float_encode(rows: Rows, scheme: Int4Group, _: Layout) -> Stored:
    from quantkit.numerics import fused_cpu

    packed_RW, scale_RG = fused_cpu.quantize_values(
        _kernel_values(rows), group_size=scheme.group_size, scales=scheme.scales, signed=scheme.signed
    )
    return {"packed": packed_RW, "scale": scale_RG}


def _float_row_sums(rows: Rows, stored: Stored, scheme: Int4Group, _: Layout) -> RowSums:
    from quantkit.numerics import fused_cpu

    return fused_cpu.error_rows_values(
        _kernel_values(rows), stored["packed"], stored["scale"], group_size=scheme.group_size
    )


# (source codec, layout) -> kernels; a test runs every key against COMPOSED
FUSED_CPU: dict[tuple[str, str], Kernels] = {
    ("fp8_block", "compressed-tensors"): Kernels(encode=_fp8_encode, to_bf16=_fp8_to_bf16, row_sums=_fp8_row_sums),
    ("float_values", "compressed-tensors"): Kernels(encode=_float_encode, to_bf16=_to_bf16, row_sums=_float_row_sums),
}
