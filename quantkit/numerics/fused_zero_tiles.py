"""The numba kernels of INT4 with zero points: 16 groups at a time, one per lane, as in fused_tiles.py.

No fastmath: every step is the IEEE operation that the numpy specification states, or is exact.
"""
# ruff: noqa: PLR0913, PLR0917

from quantkit.numerics.absmax import ZERO_GROUP_SCALE
from quantkit.numerics.bfloat16 import MAX_FINITE
from quantkit.numerics.fused_tiles import grid_tile, round_scale, weigh_by_importance, weigh_tile
from quantkit.numerics.fused_values import decode_tile, load_tile, round_bf16
from quantkit.numerics.kernel_cache import compiled as _jit
from quantkit.numerics.simd import (
    LANES,
    absolute,
    exact_multiply_add,
    f32_to_f64,
    f32_to_i32,
    f64_to_f32,
    i32_bits_as_f32,
    load_f32,
    load_f64,
    maximum,
    minimum,
    rint,
    scatter_words,
    select,
    splat_f32,
    splat_f64,
    splat_i32,
    store_f32,
    store_u8,
    store_u16,
)


@_jit
def _range_tile(x, group_size):  # type: ignore[no-untyped-def]
    """The smallest and the largest of each lane, zero included."""
    low = splat_f32(0.0)
    high = splat_f32(0.0)
    for k in range(group_size):
        value = load_f32(x, k * LANES)
        low = minimum(low, value)
        high = maximum(high, value)
    return low, high


@_jit
def _clamp(values, low, high):  # type: ignore[no-untyped-def]
    return minimum(maximum(values, splat_f32(low)), splat_f32(high))


@_jit
def _round_levels(x, inverse, zero):  # type: ignore[no-untyped-def]
    """The levels that codes -8..7 reach from this zero point."""
    return minimum(maximum(rint(x * inverse), splat_f32(-8.0) - zero), splat_f32(7.0) - zero)


@_jit
def _sums(x, weight, moment, inverse, zero, group_size):  # type: ignore[no-untyped-def]
    """A and B of zero_points.py, exact."""
    a = splat_f64(0.0)
    b = splat_f64(0.0)
    for k in range(group_size):
        level = _round_levels(load_f32(x, k * LANES), inverse, zero)
        wide = f32_to_f64(level)
        a = exact_multiply_add(load_f64(moment, k * LANES), wide, a)
        b = exact_multiply_add(f32_to_f64(load_f32(weight, k * LANES) * level), wide, b)
    return a, maximum(b, splat_f64(1.0))


@_jit
def _symmetric_tile(x, weight, moment, amax, group_size, candidates):  # type: ignore[no-untyped-def]
    """The best scale with zero point 0, in steps of x."""
    best_score = splat_f64(-1.0)
    best_a = splat_f64(0.0)
    best_b = splat_f64(1.0)
    for candidate in range(len(candidates)):
        inverse = splat_f32(candidates[candidate]) / amax
        a, b = _sums(x, weight, moment, inverse, splat_f32(0.0), group_size)
        score = a * a / b
        is_better = score > best_score
        best_score = select(is_better, score, best_score)
        best_a = select(is_better, a, best_a)
        best_b = select(is_better, b, best_b)
    return best_a / best_b


@_jit
def _span_tile(x, weight, moment, group_size, spans):  # type: ignore[no-untyped-def]
    """The best scale, in steps of x, and its zero point."""
    low, high = _range_tile(x, group_size)
    span = maximum(high - low, splat_f32(1.0))
    best_score = splat_f64(-1.0)
    best_a = splat_f64(0.0)
    best_b = splat_f64(1.0)
    best_zero = splat_f32(0.0)
    for candidate in range(len(spans)):
        inverse = splat_f32(spans[candidate]) / span
        zero = _clamp(rint(((high + low) * inverse + splat_f32(1.0)) * splat_f32(-0.5)), -8.0, 7.0)
        a, b = _sums(x, weight, moment, inverse, zero, group_size)
        score = a * a / b
        is_better = score > best_score
        best_score = select(is_better, score, best_score)
        best_a = select(is_better, a, best_a)
        best_b = select(is_better, b, best_b)
        best_zero = select(is_better, zero, best_zero)
    return best_a / best_b, best_zero


@_jit
def _finish_tile(x, weight, moment, unit, ratio, zero, group_size):  # type: ignore[no-untyped-def]
    """What to multiply x by to get levels, the bits of the scale, and what is taken off the weighted error."""
    bits = round_scale(minimum(ratio * unit, splat_f64(MAX_FINITE)))
    scale = f32_to_f64(i32_bits_as_f32(bits << splat_i32(16)))
    inverse = f64_to_f32(unit / scale)
    a, b = _sums(x, weight, moment, inverse, zero, group_size)
    f = scale / unit
    return inverse, bits, (a + a - f * b) * f


@_jit
def _search_tile(x, weight, moment, unit, group_size, candidates, spans, importance, at):  # type: ignore[no-untyped-def]
    """What to multiply x by to get levels, the bits of the scales, and zero points."""
    largest, rms = weigh_tile(x, weight, moment, group_size)
    if len(importance) > 0:
        weigh_by_importance(importance, at, x, weight, moment, rms, 1.0, group_size)
    is_zero = (largest == splat_f32(0.0)) | (unit == splat_f64(0.0))

    amax = maximum(absolute(largest), splat_f32(1.0))
    ratio = _symmetric_tile(x, weight, moment, amax, group_size, candidates)
    none = splat_f32(0.0)
    symmetric, symmetric_bits, symmetric_gain = _finish_tile(x, weight, moment, unit, ratio, none, group_size)
    ratio, zero = _span_tile(x, weight, moment, group_size, spans)
    spanning, bits, gain = _finish_tile(x, weight, moment, unit, ratio, zero, group_size)

    is_better = gain > symmetric_gain
    inverse = select(is_zero, splat_f32(0.0), select(is_better, spanning, symmetric))
    bits = select(is_zero, splat_i32(ZERO_GROUP_SCALE), select(is_better, bits, symmetric_bits))
    return inverse, bits, select(is_zero, none, select(is_better, zero, none))


@_jit
def _rounded(values):  # type: ignore[no-untyped-def]
    return i32_bits_as_f32(round_bf16(values))


@_jit
def _min_max_tile(x, group_size):  # type: ignore[no-untyped-def]
    """Values to levels that are not rounded, in place; the bits of the scales, and zero points: min_max.py."""
    for k in range(group_size):
        store_f32(x, k * LANES, _rounded(load_f32(x, k * LANES)))
    low, high = _range_tile(x, group_size)
    bits = round_bf16(_rounded(high - low) / splat_f32(15.0))
    is_zero = bits == splat_i32(0)
    bits = select(is_zero, splat_i32(ZERO_GROUP_SCALE << 16), bits)
    scale = i32_bits_as_f32(bits)
    zero = rint(_clamp(_rounded(splat_f32(-8.0) - _rounded(low / scale)), -8.0, 7.0))
    underflow = select(low < splat_f32(0.0), splat_f32(7.0), splat_f32(0.0))
    zero = select(is_zero, underflow, zero)
    for k in range(group_size):
        shifted = _rounded(_rounded(load_f32(x, k * LANES) / scale) + zero)
        # the code less the zero point: small integers, exact
        store_f32(x, k * LANES, rint(_clamp(shifted, -8.0, 7.0)) - zero)
    return bits >> splat_i32(16), zero


@_jit
def _pack_tile(x, inverse, zero, first, group_size, packed):  # type: ignore[no-untyped-def]
    for k in range(0, group_size, 8):
        word = splat_i32(0)
        for j in range(8):
            level = _round_levels(load_f32(x, (k + j) * LANES), inverse, zero)
            word = word | (f32_to_i32(level + zero + splat_f32(8.0)) << splat_i32(4 * j))
        scatter_words(packed, (first * group_size + k) // 2, group_size // 2, word)


@_jit
def quantize_zero_tiles(  # type: ignore[no-untyped-def]
    source,
    kind,
    scale,
    num_groups,
    group_size,
    candidates,
    spans,
    importance,
    groups_per_row,
    scratch,
    packed,
    int4_scale,
    int4_zero,
):
    """All groups of ``source`` (bytes); no candidates means min and max. ``importance``: as in fused_tiles.py."""
    x, weight, moment = scratch
    for start in range(0, num_groups, LANES):
        first = min(start, num_groups - LANES)
        load_tile(source, kind, first, group_size, x)
        if len(candidates) == 0:
            decode_tile(kind, first, group_size, scale, x)
            bits, zero = _min_max_tile(x, group_size)
            inverse = splat_f32(1.0)
        else:
            unit = grid_tile(kind, first, group_size, scale, x)
            at = first % groups_per_row * group_size * 2
            inverse, bits, zero = _search_tile(x, weight, moment, unit, group_size, candidates, spans, importance, at)
        _pack_tile(x, inverse, zero, first, group_size, packed)
        store_u16(int4_scale, first, bits)
        store_u8(int4_zero, first, f32_to_i32(zero))
