"""What a CPU does with rows: the composition of codec and encoder, and numba's twins of it. No layout is known here.

The composition is the specification. ``FUSED_CPU`` holds optimisations that give the same bytes in one pass; a missing
key falls back. Legend: R rows, C columns, G groups, W packed words.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from quantkit.codecs.codec import Array
from quantkit.codecs.fp8_block import Fp8Block
from quantkit.codecs.int4_group import Int4Group
from quantkit.numerics import bfloat16, grid, metrics
from quantkit.numerics.packing import Int4Words, pack_int4, unpack_int4
from quantkit.tensors import BF16, F16
from quantkit.transcode.rows import Rows
from quantkit.transcode.smoothed import smoothed_sums
from quantkit.weights.weight import Weight

RowSums = tuple[NDArray[np.float64], NDArray[np.float64]]  # squared error and squared weight, of each row


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """INT4 words, the error of each row, and the CPU time that the encoder took.

    ``is_given``: the words were there already, and are not what the specification would make.
    """

    words: Int4Words
    sums: RowSums
    encode_seconds: float
    is_given: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One implementation of what is done with rows."""

    encode: Callable[[Rows, Int4Group], Int4Words]
    to_bf16: Callable[[Rows], NDArray[np.uint16]]
    row_sums: Callable[[Rows, Int4Words, Int4Group], RowSums]

    def quantize(self, rows: Rows, scheme: Int4Group) -> Quantized:
        """Encode, then compare."""
        started = time.thread_time()
        words = self.encode(rows, scheme)
        encode_seconds = time.thread_time() - started
        return Quantized(words=words, sums=self.row_sums(rows, words, scheme), encode_seconds=encode_seconds)


def kernels_for(weight: Weight, scheme: Int4Group | None) -> Kernels:
    """The fused kernels from this storage format into that, or the specification. ``scheme``: None for BF16."""
    found = FUSED_CPU.get((weight.codec.name, INT4_GROUP if scheme is None else scheme.name), COMPOSED)
    return found if scheme is None or scheme.smoothed is None else replace(found, row_sums=smoothed_sums)


def _encode(rows: Rows, scheme: Int4Group) -> Int4Words:
    codec = rows.weight.codec
    if scheme.scales == "search" and isinstance(codec, Fp8Block):
        ints_RC, unit_RG = grid.fp8_grid(
            rows.parts["codes"], rows.parts["scale"], group_size=scheme.group_size, **fp8_place(rows)
        )
        made = scheme.encode_grid(ints_RC, unit_RG, rows.importance_C)
    else:
        made = scheme.encode_values(codec.decode(rows.parts, rows.first_row), rows.importance_C)
    return Int4Words(pack_int4(made.codes_RC), made.scale_RG, made.zero_RG)


def _to_bf16(rows: Rows) -> NDArray[np.uint16]:
    if rows.weight.stored.spec.dtype == BF16:
        return cast(NDArray[np.uint16], rows.parts["values"])
    return bfloat16.from_float32(rows.weight.codec.decode(rows.parts, rows.first_row))


def _row_sums(rows: Rows, words: Int4Words, scheme: Int4Group) -> RowSums:
    return weighed_rows(rows, words, scheme, None)


def weighed_rows(rows: Rows, words: Int4Words, scheme: Int4Group, moments_C: NDArray[np.float64] | None) -> RowSums:
    """As ``row_sums``, squares multiplied by the moments of their columns. By the specification alone, for few rows."""
    values_RC = rows.weight.codec.decode(rows.parts, rows.first_row)
    codes_RC = unpack_int4(words.packed, rows.weight.num_cols)
    return metrics.error_rows(
        values_RC,
        codes_RC,
        words.scale,
        group_size=scheme.group_size,
        zero_RG=words.zero,
        moments_C=moments_C,
    )


COMPOSED = Kernels(encode=_encode, to_bf16=_to_bf16, row_sums=_row_sums)


def fp8_place(rows: Rows) -> dict[str, Any]:
    """Where rows lie in the grid of blocks."""
    codec = cast(Fp8Block, rows.weight.codec)
    return {"block": codec.block, "row_offset": codec.row_offset + rows.first_row}


def _fp8_encode(rows: Rows, scheme: Int4Group) -> Int4Words:
    from quantkit.numerics import fused_cpu

    codes_RC, scale_BB, options = rows.parts["codes"], rows.parts["scale"], _choice(rows, scheme) | fp8_place(rows)
    return Int4Words(*fused_cpu.quantize_fp8(codes_RC, scale_BB, signed=scheme.signed, **options))


def _fp8_encode_zero(rows: Rows, scheme: Int4Group) -> Int4Words:
    from quantkit.numerics import fused_zero_points

    codes_RC, scale_BB, options = rows.parts["codes"], rows.parts["scale"], _choice(rows, scheme) | fp8_place(rows)
    return Int4Words(*fused_zero_points.quantize_fp8(codes_RC, scale_BB, **options))


def _choice(rows: Rows, scheme: Int4Group) -> dict[str, Any]:
    return {"group_size": scheme.group_size, "scales": scheme.scales, "importance_C": rows.importance_C}


def _fp8_to_bf16(rows: Rows) -> NDArray[np.uint16]:
    from quantkit.numerics import fused_cpu

    return fused_cpu.dequantize_fp8(rows.parts["codes"], rows.parts["scale"], **fp8_place(rows))


def _fp8_row_sums(rows: Rows, words: Int4Words, scheme: Int4Group) -> RowSums:
    from quantkit.numerics import fused_cpu

    return fused_cpu.error_rows_fp8(
        rows.parts["codes"],
        rows.parts["scale"],
        words.packed,
        words.scale,
        group_size=scheme.group_size,
        zero_RG=words.zero,
        **fp8_place(rows),
    )


def kernel_values(rows: Rows) -> Array:
    """BF16 bits as they are, FP16 widened: the float kernels know BF16 and FP32."""
    values: Array = rows.parts["values"]
    return values.astype(np.float32) if rows.weight.stored.spec.dtype == F16 else values


def _float_encode(rows: Rows, scheme: Int4Group) -> Int4Words:
    from quantkit.numerics import fused_cpu

    return Int4Words(*fused_cpu.quantize_values(kernel_values(rows), **_choice(rows, scheme), signed=scheme.signed))


def _float_encode_zero(rows: Rows, scheme: Int4Group) -> Int4Words:
    from quantkit.numerics import fused_zero_points

    return Int4Words(*fused_zero_points.quantize_values(kernel_values(rows), **_choice(rows, scheme)))


def _float_row_sums(rows: Rows, words: Int4Words, scheme: Int4Group) -> RowSums:
    from quantkit.numerics import fused_cpu

    return fused_cpu.error_rows_values(
        kernel_values(rows), words.packed, words.scale, group_size=scheme.group_size, zero_RG=words.zero
    )


# (source codec, target) -> kernels; a test runs every key against COMPOSED
INT4_GROUP, INT4_ZERO = "int4_group", "int4_zero"
FUSED_CPU: dict[tuple[str, str], Kernels] = {
    ("fp8_block", INT4_GROUP): Kernels(encode=_fp8_encode, to_bf16=_fp8_to_bf16, row_sums=_fp8_row_sums),
    ("fp8_block", INT4_ZERO): Kernels(encode=_fp8_encode_zero, to_bf16=_fp8_to_bf16, row_sums=_fp8_row_sums),
    ("float_values", INT4_GROUP): Kernels(encode=_float_encode, to_bf16=_to_bf16, row_sums=_float_row_sums),
    ("float_values", INT4_ZERO): Kernels(encode=_float_encode_zero, to_bf16=_to_bf16, row_sums=_float_row_sums),
}
