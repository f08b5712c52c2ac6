"""What the numba kernels read: 16 groups at a time as values, the error of INT4 against them, and whole rows as BF16.

No fastmath: every step is the IEEE operation that the numpy specification states, or is exact.
"""
# ruff: noqa: PLR0913, PLR0917

from quantkit.numerics.fp8 import E4M3_UNIT
from quantkit.numerics.kernel_cache import compiled as _jit
from quantkit.numerics.simd import (
    LANES,
    f32_bits_as_i32,
    f32_to_f64,
    gather_words,
    i32_bits_as_f32,
    i32_to_f64,
    load_f32,
    load_u8,
    load_u16,
    select,
    splat_f32,
    splat_f64,
    splat_i32,
    store_f32,
    store_f64,
    store_u16,
)

FP8, BF16, F32 = 0, 1, 2  # kinds of source


@_jit
def decode_e4m3(byte):  # type: ignore[no-untyped-def]
    """E4M3 codes to float32 integers of 2**-9, in integer steps: no subnormal ever meets the float unit."""
    magnitude = byte & splat_i32(0x7F)
    scaled = i32_bits_as_f32((magnitude << splat_i32(20)) + splat_i32(129 << 23))
    # exponent field 0 has no hidden one
    ints = select(magnitude < splat_i32(8), scaled + scaled - splat_f32(8.0), scaled)
    return i32_bits_as_f32(f32_bits_as_i32(ints) | ((byte & splat_i32(0x80)) << splat_i32(24)))


@_jit
def round_bf16(values):  # type: ignore[no-untyped-def]
    """The bits of the nearest BF16, ties to even, in the upper half of each lane. No NaN."""
    word = f32_bits_as_i32(values)
    odd = (word >> splat_i32(16)) & splat_i32(1)
    return (word + splat_i32(0x7FFF) + odd) & splat_i32(-65536)


@_jit
def load_tile(source, kind, first, group_size, x):  # type: ignore[no-untyped-def]
    """Transpose 16 groups into ``x``: integers of 2**-9 for FP8, values otherwise."""
    for k in range(0, group_size, 4):
        if kind == FP8:
            words = gather_words(source, first * group_size + k, group_size)
            for j in range(4):
                byte = (words >> splat_i32(8 * j)) & splat_i32(0xFF)
                store_f32(x, (k + j) * LANES, decode_e4m3(byte))
        elif kind == BF16:
            for j in range(0, 4, 2):
                words = gather_words(source, 2 * (first * group_size + k + j), 2 * group_size)
                store_f32(x, (k + j) * LANES, i32_bits_as_f32(words << splat_i32(16)))
                store_f32(x, (k + j + 1) * LANES, i32_bits_as_f32(words & splat_i32(-65536)))
        else:
            for j in range(4):
                words = gather_words(source, 4 * (first * group_size + k + j), 4 * group_size)
                store_f32(x, (k + j) * LANES, i32_bits_as_f32(words))


@_jit
def decode_tile(kind, first, group_size, scale, x):  # type: ignore[no-untyped-def]
    """Integers of 2**-9 to values, in place."""
    if kind == FP8:
        block_scale = load_f32(scale, first)
        for k in range(group_size):
            store_f32(x, k * LANES, load_f32(x, k * LANES) * splat_f32(E4M3_UNIT) * block_scale)


@_jit
def error_tiles(  # type: ignore[no-untyped-def]
    source,
    kind,
    scale,
    num_groups,
    group_size,
    groups_per_row,
    packed,
    int4_scale,
    int4_zero,
    scratch,
    error2,
    reference2,
):
    """Add each group's sums to its row, in the order of metrics.py. ``int4_zero`` (bytes): empty if all are 0."""
    x, _, sums = scratch
    done = 0
    for start in range(0, num_groups, LANES):
        first = min(start, num_groups - LANES)
        load_tile(source, kind, first, group_size, x)
        decode_tile(kind, first, group_size, scale, x)
        step = f32_to_f64(i32_bits_as_f32(load_u16(int4_scale, first) << splat_i32(16)))
        # the nibble of level 0
        offset = splat_i32(8)
        if len(int4_zero) > 0:
            byte = load_u8(int4_zero, first)
            offset = offset + (byte & splat_i32(0x7F)) - (byte & splat_i32(0x80))
        error = splat_f64(0.0)
        reference = splat_f64(0.0)
        for k in range(0, group_size, 8):
            words = gather_words(packed, (first * group_size + k) // 2, group_size // 2)
            for j in range(8):
                nibble = (words >> splat_i32(4 * j)) & splat_i32(15)
                value = f32_to_f64(load_f32(x, (k + j) * LANES))
                difference = value - i32_to_f64(nibble - offset) * step
                error = error + difference * difference
                reference = reference + value * value
        store_f64(sums, 0, error)
        store_f64(sums, LANES, reference)
        for lane in range(done - first, LANES):
            row = (first + lane) // groups_per_row
            error2[row] += sums[lane]
            reference2[row] += sums[LANES + lane]
        done = first + LANES


@_jit
def dequantize_rows(  # type: ignore[no-untyped-def]
    codes, last_codes, scale, block_rows, block_cols, row_offset, num_rows, num_cols, is_bf16, out
):
    """Decode block by block. ``out`` has 16 items to spare: a short block spills into what comes next."""
    total = num_rows * num_cols
    for row in range(num_rows):
        block_row = (row + row_offset) // block_rows
        for left in range(0, num_cols, block_cols):
            factor = splat_f32(scale[block_row, left // block_cols])
            end = row * num_cols + min(left + block_cols, num_cols)
            for at in range(row * num_cols + left, end, LANES):
                if at + LANES <= total:
                    byte = load_u8(codes, at)
                else:
                    byte = load_u8(last_codes, at - (total - min(total, LANES)))
                value = decode_e4m3(byte) * splat_f32(E4M3_UNIT) * factor
                if is_bf16:
                    store_u16(out, at, round_bf16(value) >> splat_i32(16))
                else:
                    store_f32(out, at, value)
