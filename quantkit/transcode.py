"""Rows of stored source parts -> rows of stored output tensors; the one place that chooses reference or numba.

The composition codec -> encoder -> packing is the specification. ``FUSED_CPU`` holds optimisations that give the
same bytes in one pass; a missing key falls back. Legend: R rows, C columns, G groups, W packed words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.header import StoredTensor
from quantkit.checkpoint.reader import read_tensor
from quantkit.codecs.fp8_block import Fp8Block, scale_values
from quantkit.codecs.int4_group import Int4Group
from quantkit.codecs.weight import Array, Parts, Weight
from quantkit.layouts import compressed_tensors as ct
from quantkit.numerics import bfloat16, grid, metrics
from quantkit.tensors import BF16, F16, F32, TensorSpec

Packed = tuple[NDArray[np.int32], NDArray[np.uint16]]  # packed_RW, scale_RG
RowSums = tuple[NDArray[np.float64], NDArray[np.float64]]  # squared error and squared weight, of each row


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Checked rows of one weight. ``first_row`` is their place in the weight, ``parts`` the arrays."""

    weight: Weight
    first_row: int
    parts: Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One implementation of the four steps. ``is_clean`` may be quick, ``codec.check_values`` finds the place."""

    is_clean: Callable[[Rows], bool]
    quantize: Callable[[Rows, Int4Group], Packed]
    to_bf16: Callable[[Rows], NDArray[np.uint16]]
    row_sums: Callable[[Rows, Packed, Int4Group], RowSums]


def read_rows(weight: Weight, first_row: int, last_row: int, *, use_fused: bool = True) -> Rows:
    """Rows ``[first_row, last_row)`` from the file, scales as float32 blocks. Raises SourceError for bad values."""
    stored = weight.stored
    matrix = TensorSpec(stored.spec.dtype, (weight.num_rows, weight.num_cols))
    span = StoredTensor(stored.name, matrix, stored.path, stored.begin).rows(first_row, last_row)
    parts: dict[str, Array] = {weight.main: read_tensor(span)}
    if isinstance(weight.codec, Fp8Block):
        parts["scale"] = _read_scale(weight, weight.codec)
    rows = Rows(weight=weight, first_row=first_row, parts=parts)
    if not kernels_for(weight, use_fused=use_fused).is_clean(rows):
        weight.codec.check_values(weight, parts, first_row)
    weight.codec.check_scale(weight, parts, first_row)
    return rows


def check_copied(weight: Weight, part: str, raw: NDArray[np.uint8], first_byte: int) -> None:
    """Raise SourceError for NaN or Inf in what is carried over as it is, and for a native scale of zero."""
    dtype = weight.parts[part].spec.dtype
    if dtype not in (BF16, F16, F32):
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


def kernels_for(weight: Weight, *, use_fused: bool = True) -> Kernels:
    """The fused kernels of this weight's storage format, or the specification."""
    fused = FUSED_CPU.get(weight.codec.name) if use_fused else None
    return COMPOSED if fused is None else fused


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


def _is_clean(rows: Rows) -> bool:
    return False  # look at every value


def _quantize(rows: Rows, target: Int4Group) -> Packed:
    codec = rows.weight.codec
    if target.scales == "search" and isinstance(codec, Fp8Block) and codec.block_cols % target.group_size == 0:
        ints_RC, unit_RG = grid.fp8_grid(
            rows.parts["codes"],
            rows.parts["scale"],
            block=codec.block,
            row_offset=codec.row_offset + rows.first_row,
            group_size=target.group_size,
        )
        codes_RC, scale_RG = target.encode_grid(ints_RC, unit_RG)
    else:
        codes_RC, scale_RG = target.encode_values(codec.decode(rows.parts, rows.first_row))
    return ct.pack(codes_RC), scale_RG


def _to_bf16(rows: Rows) -> NDArray[np.uint16]:
    return bfloat16.from_float32(rows.weight.codec.decode(rows.parts, rows.first_row))


def _row_sums(rows: Rows, packed: Packed, target: Int4Group) -> RowSums:
    values_RC = rows.weight.codec.decode(rows.parts, rows.first_row)
    return metrics.error_rows(values_RC, packed[0], packed[1], group_size=target.group_size)


COMPOSED = Kernels(is_clean=_is_clean, quantize=_quantize, to_bf16=_to_bf16, row_sums=_row_sums)


def _fp8_arguments(rows: Rows) -> dict[str, Any]:
    codec = cast(Fp8Block, rows.weight.codec)
    return {"block": codec.block, "row_offset": codec.row_offset + rows.first_row}


def _fp8_is_clean(rows: Rows) -> bool:
    from quantkit.numerics import fused_cpu

    return fused_cpu.first_nan(rows.parts["codes"]) is None


def _fp8_quantize(rows: Rows, target: Int4Group) -> Packed:
    from quantkit.numerics import fused_cpu

    return fused_cpu.quantize_fp8(
        rows.parts["codes"],
        rows.parts["scale"],
        group_size=target.group_size,
        scales=target.scales,
        signed=target.signed,
        **_fp8_arguments(rows),
    )


def _fp8_to_bf16(rows: Rows) -> NDArray[np.uint16]:
    from quantkit.numerics import fused_cpu

    return fused_cpu.dequantize_fp8(rows.parts["codes"], rows.parts["scale"], **_fp8_arguments(rows))


def _fp8_row_sums(rows: Rows, packed: Packed, target: Int4Group) -> RowSums:
    from quantkit.numerics import fused_cpu

    return fused_cpu.error_rows_fp8(
        rows.parts["codes"],
        rows.parts["scale"],
        *packed,
        group_size=target.group_size,
        **_fp8_arguments(rows),
    )


def _kernel_values(rows: Rows) -> Array:
    """BF16 bits as they are, FP16 widened: the float kernels know BF16 and FP32."""
    values: Array = rows.parts["values"]
    return values.astype(np.float32) if rows.weight.stored.spec.dtype == F16 else values


def _float_is_clean(rows: Rows) -> bool:
    from quantkit.numerics import fused_cpu

    return fused_cpu.first_nonfinite(_kernel_values(rows)) is None


def _float_quantize(rows: Rows, target: Int4Group) -> Packed:
    from quantkit.numerics import fused_cpu

    return fused_cpu.quantize_values(
        _kernel_values(rows), group_size=target.group_size, scales=target.scales, signed=target.signed
    )


def _float_to_bf16(rows: Rows) -> NDArray[np.uint16]:
    if rows.weight.stored.spec.dtype == BF16:
        return cast(NDArray[np.uint16], rows.parts["values"])
    return _to_bf16(rows)


def _float_row_sums(rows: Rows, packed: Packed, target: Int4Group) -> RowSums:
    from quantkit.numerics import fused_cpu

    return fused_cpu.error_rows_values(_kernel_values(rows), *packed, group_size=target.group_size)


# source codec -> kernels into int4_group as compressed-tensors words; a test runs every key against COMPOSED
FUSED_CPU: dict[str, Kernels] = {
    "fp8_block": Kernels(is_clean=_fp8_is_clean, quantize=_fp8_quantize, to_bf16=_fp8_to_bf16, row_sums=_fp8_row_sums),
    "float_values": Kernels(
        is_clean=_float_is_clean, quantize=_float_quantize, to_bf16=_float_to_bf16, row_sums=_float_row_sums
    ),
}
