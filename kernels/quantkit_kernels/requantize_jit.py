"""The kernels behind requantize.py; what each step must equal is stated in quantkit's numpy specification.

Suffixes as there. A tile is ``BLOCK_G`` groups of ``GROUP`` weights, numbered along rows and across row ends.
"""

import triton
import triton.language as tl

from quantkit_kernels.bits_jit import ZERO_GROUP_SCALE, e4m3_ints, e4m3_values, load_values, round_even

# kinds of source: E4M3 codes as integers of 2**-9, E4M3 codes as values, BF16 or float32 values;
# SCALE_STEP: columns that share a scale, those of a group or one
FP8_CODES, FP8_VALUES, VALUES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_MAX_WEIGHT = tl.constexpr(2**18 - 1)
_MOST_UNBIASED = tl.constexpr(1.125)
_MIN_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def _round_codes(values, inverse):  # type: ignore[no-untyped-def]
    return round_even(tl.minimum(tl.maximum(values * inverse, -8.0), 7.0))


@triton.jit
def _load_scale(  # type: ignore[no-untyped-def]
    scale_ptr, offsets, mask, num_cols, row_offset, block_rows, block_cols, scale_cols
):
    """The multiplier of the weights at ``offsets`` into the matrix."""
    row = offsets // num_cols
    col = offsets - row * num_cols
    at = ((row + row_offset) // block_rows) * scale_cols + col // block_cols
    return tl.load(scale_ptr + at, mask=mask, other=0.0)


@triton.jit
def _square_root(values):  # type: ignore[no-untyped-def]
    """The integer square root of int64 values below 2**52, whatever the last bit of the float one is."""
    root = tl.sqrt(values.to(tl.float64)).to(tl.int64)
    root = root - (root * root > values).to(tl.int64)
    return root + ((root + 1) * (root + 1) <= values).to(tl.int64)


@triton.jit
def _first_of_largest(x, amax, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first element of each group whose magnitude is the largest one, with its sign."""
    column = tl.arange(0, GROUP)[None, :]
    first = tl.min(tl.where(tl.abs(x) == amax[:, None], column, GROUP), axis=1)
    return tl.sum(tl.where(column == first[:, None], x, 0), axis=1)


@triton.jit
def _round_scale(value):  # type: ignore[no-untyped-def]
    """BF16 bits of positive float64 values of at least 2**-126, rounded once, ties to even; overflow is infinity."""
    word = value.to(tl.int64, bitcast=True)
    odd = (word >> 45) & 1
    # drop 45 of 52 bits of significand, then the exponent's bias becomes that of BF16
    rounded = ((word + ((1 << 44) - 1) + odd) >> 45) - ((1023 - 127) << 7)
    return tl.minimum(rounded, 0x7F80).to(tl.int32)


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    x, unit, levels, GROUP: tl.constexpr, CANDIDATES: tl.constexpr, SIGNED: tl.constexpr, HAS_IMPORTANCE: tl.constexpr
):
    """What to multiply integers by to get codes, and the bits of the scales; ``levels``: of importance, 0 unknown."""
    amax = tl.max(tl.abs(x), axis=1)
    largest = _first_of_largest(x, amax, GROUP)
    wide = x.to(tl.int64)
    mean_square = tl.sum(wide * wide, axis=1) // GROUP
    rms = _square_root(mean_square).to(tl.int32)
    weight = tl.minimum(rms[:, None] + tl.abs(x), _MAX_WEIGHT)
    if HAS_IMPORTANCE:
        flatter = tl.minimum(rms[:, None] + (tl.abs(x) >> 1), _MAX_WEIGHT)
        weighed = ((flatter.to(tl.int64) * levels.to(tl.int64)) >> 16).to(tl.int32)
        weight = tl.where(levels > 0, tl.maximum(weighed, 1), weight)
    weight = weight.to(tl.float32)
    values = x.to(tl.float32)
    moment = weight.to(tl.float64) * values.to(tl.float64)
    flip = tl.full(amax.shape, 1.0, tl.float32)
    if SIGNED:
        flip = tl.where(largest > 0, -1.0, flip)
    divisor = tl.maximum(amax, 1).to(tl.float32)
    best_score = tl.full(amax.shape, -1.0, tl.float64)
    best_a = tl.full(amax.shape, 0.0, tl.float64)
    best_b = tl.full(amax.shape, 1.0, tl.float64)
    best_inverse = tl.full(amax.shape, 0.0, tl.float32)
    for index in tl.static_range(len(CANDIDATES)):
        steps = tl.full(amax.shape, CANDIDATES[index], tl.float32)
        inverse = tl.math.div_rn(steps, divisor) * flip
        code = _round_codes(values, inverse[:, None])
        a = tl.sum(moment * code.to(tl.float64), axis=1)
        b = tl.sum((weight * code * code).to(tl.int32), axis=1).to(tl.float64)
        b = tl.maximum(b, 1.0)
        score = a * a / b
        is_better = score > best_score
        best_score = tl.where(is_better, score, best_score)
        best_a = tl.where(is_better, tl.abs(a), best_a)
        best_b = tl.where(is_better, b, best_b)
        best_inverse = tl.where(is_better, inverse, best_inverse)
    ratio = best_a / best_b
    if HAS_IMPORTANCE:
        known = levels.to(tl.int64) * wide
        c = tl.sum(known * wide, axis=1).to(tl.float64)
        d = tl.sum(known * _round_codes(values, best_inverse[:, None]).to(tl.int64), axis=1)
        unbiased = tl.minimum(c / tl.maximum(tl.abs(d), 1).to(tl.float64), ratio * _MOST_UNBIASED)
        ratio = tl.where(c > 0.0, unbiased, ratio)
    bits = _round_scale(tl.maximum(ratio * unit, _MIN_NORMAL))
    magnitude = (bits << 16).to(tl.float32, bitcast=True).to(tl.float64)
    is_zero = (amax == 0) | (unit == 0.0)
    inverse = tl.where(is_zero, 0.0, (unit / magnitude).to(tl.float32) * flip)
    bits = tl.where(flip < 0.0, bits | 0x8000, bits)
    return inverse, tl.where(is_zero, ZERO_GROUP_SCALE, bits)


@triton.jit
def search_kernel(  # type: ignore[no-untyped-def]
    source_ptr,
    scale_ptr,
    num_cols,
    row_offset,
    block_rows,
    block_cols,
    scale_cols,
    KIND: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    importance_ptr,
    packed_ptr,
    int4_scale_ptr,
    num_groups,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SIGNED: tl.constexpr,
    HAS_IMPORTANCE: tl.constexpr,
):
    """Packed words and scales of ``BLOCK_G`` groups."""
    group = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    is_group = group < num_groups
    offsets = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = tl.broadcast_to(is_group[:, None], offsets.shape)
    levels = tl.zeros(offsets.shape, tl.int32)
    if HAS_IMPORTANCE:
        column = (group % (num_cols // GROUP))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        levels = tl.load(importance_ptr + column)
    if SCALE_STEP == GROUP:
        scale = _load_scale(
            scale_ptr, group * GROUP, is_group, num_cols, row_offset, block_rows, block_cols, scale_cols
        )
    if KIND == FP8_CODES:
        x = e4m3_ints(tl.load(source_ptr + offsets, mask=mask, other=0))
        inverse, bits = _search(x, scale.to(tl.float64) * (2.0**-9), levels, GROUP, CANDIDATES, SIGNED, HAS_IMPORTANCE)
    else:
        if KIND == FP8_VALUES:
            if SCALE_STEP == GROUP:
                scale = scale[:, None]
            else:
                scale = _load_scale(scale_ptr, offsets, mask, num_cols, row_offset, block_rows, block_cols, scale_cols)
            scaled = e4m3_values(tl.load(source_ptr + offsets, mask=mask, other=0)) * scale
        else:
            scaled = load_values(source_ptr, offsets, mask)
        amax = tl.max(tl.abs(scaled), axis=1).to(tl.float64)
        divisor = tl.where(amax == 0.0, 1.0, amax)
        ratio = scaled.to(tl.float64) * 65536.0 / divisor[:, None]
        x = round_even(ratio).to(tl.int32)
        inverse, bits = _search(x, amax * (2.0**-16), levels, GROUP, CANDIDATES, SIGNED, HAS_IMPORTANCE)
    code = _round_codes(x.to(tl.float32), inverse[:, None]).to(tl.int32) + 8
    shift = 4 * tl.arange(0, 8)
    # a sum of bits that do not meet; it wraps into the sign
    words = tl.sum(tl.reshape(code, (BLOCK_G, GROUP // 8, 8)) << shift[None, None, :], axis=2)
    word = group[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]
    tl.store(packed_ptr + word, words, mask=is_group[:, None])
    tl.store(int4_scale_ptr + group, bits.to(tl.int16), mask=is_group)


@triton.jit
def error_kernel(  # type: ignore[no-untyped-def]
    source_ptr,
    scale_ptr,
    num_cols,
    row_offset,
    block_rows,
    block_cols,
    scale_cols,
    KIND: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    packed_ptr,
    int4_scale_ptr,
    sums_ptr,
    num_groups,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """The two sums of each group, in the order of its elements: a thread has a group to itself."""
    group = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    mask = group < num_groups
    step = (tl.load(int4_scale_ptr + group, mask=mask, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    step = step.to(tl.float64)
    error = tl.full(group.shape, 0.0, tl.float64)
    reference = tl.full(group.shape, 0.0, tl.float64)
    scale = tl.full(group.shape, 1.0, tl.float32)
    if KIND == FP8_VALUES:
        scale = _load_scale(scale_ptr, group * GROUP, mask, num_cols, row_offset, block_rows, block_cols, scale_cols)
    for first in range(0, GROUP, 8):
        word = tl.load(packed_ptr + (group * GROUP + first) // 8, mask=mask, other=0)
        for k in tl.static_range(8):
            at = group * GROUP + first + k
            if KIND == FP8_VALUES:
                if SCALE_STEP == 1:
                    scale = _load_scale(scale_ptr, at, mask, num_cols, row_offset, block_rows, block_cols, scale_cols)
                value = e4m3_values(tl.load(source_ptr + at, mask=mask, other=0)) * scale
            else:
                value = load_values(source_ptr, at, mask)
            wide = value.to(tl.float64)
            code = ((word >> (4 * k)) & 15) - 8
            difference = wide - code.to(tl.float64) * step
            error += difference * difference
            reference += wide * wide
    tl.store(sums_ptr + group, error, mask=mask)
    tl.store(sums_ptr + num_groups + group, reference, mask=mask)


@triton.jit
def row_kernel(sums_ptr, rows_ptr, num_rows, groups_per_row, num_groups, BLOCK_R: tl.constexpr):  # type: ignore[no-untyped-def]
    """The groups of a row, added in their order: a thread has a row to itself."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = row < num_rows
    error = tl.full(row.shape, 0.0, tl.float64)
    reference = tl.full(row.shape, 0.0, tl.float64)
    group = 0
    while group < groups_per_row:
        at = row * groups_per_row + group
        error += tl.load(sums_ptr + at, mask=mask, other=0.0)
        reference += tl.load(sums_ptr + num_groups + at, mask=mask, other=0.0)
        group += 1
    tl.store(rows_ptr + row, error, mask=mask)
    tl.store(rows_ptr + num_rows + row, reference, mask=mask)
