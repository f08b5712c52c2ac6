"""The numba kernels behind fused_cpu: 16 groups at a time, one per lane, sharing the work of every vector.

A tile is transposed into first-level cache, so a sum over a group never crosses lanes. Groups are
numbered along rows and across row ends: only the last tile of a call may lack groups, so it starts
earlier and writes some twice. No fastmath: every step is the IEEE operation that the numpy specification
states, or is exact.
"""
# ruff: noqa: PLR0913, PLR0917

from quantkit.numerics.absmax import ZERO_GROUP_SCALE
from quantkit.numerics.bfloat16 import MIN_NORMAL
from quantkit.numerics.fp8 import E4M3_UNIT
from quantkit.numerics.fused_values import FP8, decode_tile, load_tile, round_bf16
from quantkit.numerics.kernel_cache import compiled as _jit
from quantkit.numerics.search import MAX_WEIGHT, MOST_UNBIASED
from quantkit.numerics.simd import (
    LANES,
    absolute,
    exact_multiply_add,
    f32_to_f64,
    f32_to_i32,
    f64_bits_as_i64,
    f64_to_f32,
    floor,
    gather_words,
    i32_bits_as_f32,
    i32_to_f64,
    i64_to_i32,
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
    splat_i64,
    sqrt,
    store_f32,
    store_f64,
    store_u16,
)


@_jit
def grid_tile(kind, first, group_size, scale, x):  # type: ignore[no-untyped-def]
    """Values to integers, in place (the codes of FP8 are integers already); returns the unit of each lane."""
    if kind == FP8:
        return f32_to_f64(load_f32(scale, first)) * splat_f64(E4M3_UNIT)
    amax = splat_f32(0.0)
    for k in range(group_size):
        amax = maximum(amax, absolute(load_f32(x, k * LANES)))
    wide = f32_to_f64(amax)
    divisor = select(amax == splat_f32(0.0), splat_f64(1.0), wide)
    for k in range(group_size):
        value = f32_to_f64(load_f32(x, k * LANES))
        store_f32(x, k * LANES, f64_to_f32(rint(value * splat_f64(65536.0) / divisor)))
    return wide * splat_f64(2.0**-16)


@_jit
def _round_codes(y, inverse):  # type: ignore[no-untyped-def]
    return minimum(maximum(rint(y * inverse), splat_f32(-8.0)), splat_f32(7.0))


@_jit
def weigh_tile(x, weight, moment, group_size):  # type: ignore[no-untyped-def]
    """Fill ``weight`` with w, ``moment`` with w*x; returns each lane's first element of largest magnitude, and rms."""
    largest = splat_f32(0.0)
    squares = splat_f64(0.0)
    for k in range(group_size):
        value = load_f32(x, k * LANES)
        largest = select(absolute(value) > absolute(largest), value, largest)
        wide = f32_to_f64(value)
        squares = exact_multiply_add(wide, wide, squares)
    # the group size is a power of two, so the quotient is exact
    rms = f64_to_f32(floor(sqrt(floor(squares * splat_f64(1.0 / group_size)))))
    for k in range(group_size):
        value = load_f32(x, k * LANES)
        w = minimum(rms + absolute(value), splat_f32(MAX_WEIGHT))
        store_f32(weight, k * LANES, w)
        store_f64(moment, k * LANES, f32_to_f64(w) * f32_to_f64(value))
    return largest, rms


@_jit
def weigh_by_importance(importance, at, x, weight, moment, rms, share, group_size):  # type: ignore[no-untyped-def]
    """Make w ``rms + share |x|`` times what is known of the input channels; ``at``: the byte of the first lane's."""
    for k in range(0, group_size, 2):
        words = gather_words(importance, at + 2 * k, 2 * group_size)
        for j in range(2):
            level = i32_to_f64((words >> splat_i32(16 * j)) & splat_i32(0xFFFF))
            value = load_f32(x, (k + j) * LANES)
            w = minimum(rms + floor(absolute(value) * splat_f32(share)), splat_f32(MAX_WEIGHT))
            weighed = maximum(floor(f32_to_f64(w) * level * splat_f64(2.0**-16)), splat_f64(1.0))
            plain = load_f32(weight, (k + j) * LANES)
            w = select(f64_to_f32(level) == splat_f32(0.0), plain, f64_to_f32(weighed))
            store_f32(weight, (k + j) * LANES, w)
            store_f64(moment, (k + j) * LANES, f32_to_f64(w) * f32_to_f64(value))


@_jit
def _unbiased_tile(importance, at, x, inverse, ratio, group_size):  # type: ignore[no-untyped-def]
    """C / D of the codes that ``inverse`` makes, within its bound, where moments are known; ``ratio``: A / B."""
    high = splat_f64(0.0)
    low = splat_f64(0.0)
    d = splat_f64(0.0)
    for k in range(0, group_size, 2):
        words = gather_words(importance, at + 2 * k, 2 * group_size)
        for j in range(2):
            level = (words >> splat_i32(16 * j)) & splat_i32(0xFFFF)
            value = load_f32(x, (k + j) * LANES)
            wide = f32_to_f64(value)
            d = exact_multiply_add(i32_to_f64(level) * wide, f32_to_f64(_round_codes(value, inverse)), d)
            # two sums below 2**51, since C itself is more than float64 holds
            high = exact_multiply_add(i32_to_f64(level >> splat_i32(8)), wide * wide, high)
            low = exact_multiply_add(i32_to_f64(level & splat_i32(0xFF)), wide * wide, low)
    c = high * splat_f64(256.0) + low
    unbiased = minimum(c / maximum(absolute(d), splat_f64(1.0)), ratio * splat_f64(MOST_UNBIASED))
    return select(c > splat_f64(0.0), unbiased, ratio)


@_jit
def round_scale(scale):  # type: ignore[no-untyped-def]
    """The bits of the nearest BF16 of positive float64, ties to even, at least the smallest normal. No NaN."""
    word = f64_bits_as_i64(maximum(scale, splat_f64(MIN_NORMAL)))
    odd = (word >> splat_i64(45)) & splat_i64(1)
    # drop 45 of 52 bits of significand, then the exponent's bias becomes that of BF16
    rounded = ((word + splat_i64((1 << 44) - 1) + odd) >> splat_i64(45)) - splat_i64((1023 - 127) << 7)
    return i64_to_i32(select(rounded < splat_i64(0x7F80), rounded, splat_i64(0x7F80)))


@_jit
def _search_tile(x, weight, moment, unit, group_size, candidates, is_signed, importance, at):  # type: ignore[no-untyped-def]
    """What to multiply x by to get codes, and the bits of the scales. The bit budget stands in search.py."""
    largest, rms = weigh_tile(x, weight, moment, group_size)
    if len(importance) > 0:
        weigh_by_importance(importance, at, x, weight, moment, rms, 0.5, group_size)
    amax = maximum(absolute(largest), splat_f32(1.0))
    flip = splat_f32(1.0)
    if is_signed:
        flip = select(largest > splat_f32(0.0), splat_f32(-1.0), flip)
    best_score = splat_f64(-1.0)
    best_a = splat_f64(0.0)
    best_b = splat_f64(1.0)
    best_inverse = splat_f32(0.0)
    for candidate in range(len(candidates)):
        # x times a flipped factor is what flipped x gives
        inverse = splat_f32(candidates[candidate]) / amax * flip
        a = splat_f64(0.0)
        b = splat_i32(0)
        for k in range(group_size):
            code = _round_codes(load_f32(x, k * LANES), inverse)
            a = exact_multiply_add(load_f64(moment, k * LANES), f32_to_f64(code), a)
            b = b + f32_to_i32(load_f32(weight, k * LANES) * code * code)
        wide_b = maximum(i32_to_f64(b), splat_f64(1.0))
        score = a * a / wide_b
        is_better = score > best_score
        best_score = select(is_better, score, best_score)
        best_a = select(is_better, absolute(a), best_a)
        best_b = select(is_better, wide_b, best_b)
        best_inverse = select(is_better, inverse, best_inverse)
    ratio = best_a / best_b
    if len(importance) > 0:
        ratio = _unbiased_tile(importance, at, x, best_inverse, ratio, group_size)
    bits = round_scale(ratio * unit)
    magnitude = f32_to_f64(i32_bits_as_f32(bits << splat_i32(16)))

    is_zero = (largest == splat_f32(0.0)) | (unit == splat_f64(0.0))
    inverse = select(is_zero, splat_f32(0.0), f64_to_f32(unit / magnitude) * flip)
    sign = select(flip < splat_f32(0.0), splat_i32(0x8000), splat_i32(0))
    return inverse, select(is_zero, splat_i32(ZERO_GROUP_SCALE), bits | sign)


@_jit
def _absmax_tile(x, group_size):  # type: ignore[no-untyped-def]
    """Values to quotients, in place, and the bits of the scales: the arithmetic of absmax.py."""
    amax = splat_f32(0.0)
    for k in range(group_size):
        value = i32_bits_as_f32(round_bf16(load_f32(x, k * LANES)))
        store_f32(x, k * LANES, value)
        amax = maximum(amax, absolute(value))
    bits = round_bf16(amax / splat_f32(7.5))
    bits = select(bits == splat_i32(0), splat_i32(ZERO_GROUP_SCALE << 16), bits)
    scale = i32_bits_as_f32(bits)
    for k in range(group_size):
        store_f32(x, k * LANES, i32_bits_as_f32(round_bf16(load_f32(x, k * LANES) / scale)))
    return bits >> splat_i32(16)


@_jit
def _pack_tile(x, inverse, first, group_size, packed):  # type: ignore[no-untyped-def]
    for k in range(0, group_size, 8):
        word = splat_i32(0)
        for j in range(8):
            code = f32_to_i32(_round_codes(load_f32(x, (k + j) * LANES), inverse))
            word = word | ((code + splat_i32(8)) << splat_i32(4 * j))
        scatter_words(packed, (first * group_size + k) // 2, group_size // 2, word)


@_jit
def quantize_tiles(  # type: ignore[no-untyped-def]
    source,
    kind,
    scale,
    num_groups,
    group_size,
    candidates,
    is_signed,
    importance,
    groups_per_row,
    scratch,
    packed,
    int4_scale,
):
    """All groups of ``source`` (bytes); no candidates means absmax. ``importance``: of a row and 15 more groups."""
    x, weight, moment = scratch
    for start in range(0, num_groups, LANES):
        first = min(start, num_groups - LANES)
        load_tile(source, kind, first, group_size, x)
        if len(candidates) == 0:
            decode_tile(kind, first, group_size, scale, x)
            bits = _absmax_tile(x, group_size)
            inverse = splat_f32(1.0)
        else:
            unit = grid_tile(kind, first, group_size, scale, x)
            at = first % groups_per_row * group_size * 2
            inverse, bits = _search_tile(x, weight, moment, unit, group_size, candidates, is_signed, importance, at)
        _pack_tile(x, inverse, first, group_size, packed)
        store_u16(int4_scale, first, bits)
