import hashlib
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.numerics import absmax, bfloat16, fp8, metrics, packing, search
from quantkit.numerics.grid import fp8_grid, value_grid
from quantkit.numerics.search import CANDIDATES, MAX_IMPORTANCE, importance_levels
from quantkit.numerics.zero_points import SPANS, quantize_search

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
GROUPS = (32, 64, 128)


def _round(x, inverse, zero):
    return [int(max(-8 - zero, min(7 - zero, np.rint(np.float32(v) * inverse)))) for v in x]


def _one_by_one(x, unit, importance=None):
    """The search of one group in Python integers."""
    x = [int(value) for value in x]
    importance = [int(level) for level in importance] if importance is not None else [0] * len(x)
    rms = int(np.sqrt(float(sum(v * v for v in x) // len(x))))
    weights = [min(rms + abs(v), 2**18 - 1) for v in x]
    weights = [max(w * level // 2**16, 1) if level else w for w, level in zip(weights, importance, strict=True)]
    low, high = min(0, *x), max(0, *x)
    amax = max(-low, high)

    def sums(levels):
        a = sum(w * v * level for w, v, level in zip(weights, x, levels, strict=True))
        b = sum(w * level * level for w, level in zip(weights, levels, strict=True))
        assert abs(a) < 2**47
        assert b < 2**33
        return float(a), float(max(b, 1))

    spans = []
    for steps in SPANS[len(x)]:
        inverse = np.float32(steps) / np.float32(high - low)
        middle = np.float32(high + low) * inverse
        spans.append((inverse, int(max(-8, min(7, np.rint((middle + np.float32(1)) * np.float32(-0.5)))))))
    finished = []
    for candidates in ([(np.float32(s) / np.float32(amax), 0) for s in CANDIDATES[len(x)]], spans):
        scored = []
        for inverse, zero in candidates:
            a, b = sums(_round(x, inverse, zero))
            scored.append((a * a / b, a / b, zero))
        _, ratio, zero = max(scored, key=lambda candidate: candidate[0])
        scale = bfloat16.from_float64(np.array([max(ratio * unit, 2.0**-126)]))
        wide = float(bfloat16.to_float32(scale)[0])
        levels = _round(x, np.float32(unit / wide), zero)
        a, b = sums(levels)
        f = wide / unit
        finished.append(((a + a - f * b) * f, [level + zero for level in levels], int(scale[0]), zero))
    return max(finished, key=lambda result: result[0])[1:]


@pytest.mark.parametrize("weighed", ["by size", "by importance"])
@pytest.mark.parametrize("group_size", GROUPS)
def test_arrays_give_what_one_group_gives(group_size, weighed, random_fp8):
    rng = np.random.default_rng(0)
    ints = fp8.E4M3_INTS[random_fp8(6, 256, (1, 1))[0]]
    unit = np.exp(rng.uniform(-9, 2, (6, 256 // group_size)))
    moments = np.exp(rng.uniform(-12, 3, 256))
    moments[:group_size] = 0.0
    levels = importance_levels(moments, group_size=group_size) if weighed == "by importance" else None
    codes, scale, zero = quantize_search(ints, unit, group_size=group_size, importance_C=levels)
    for row in range(6):
        for group in range(256 // group_size):
            part = slice(group * group_size, (group + 1) * group_size)
            if ints[row, part].any():
                expected = _one_by_one(ints[row, part], unit[row, group], None if levels is None else levels[part])
                assert (codes[row, part].tolist(), scale[row, group], zero[row, group]) == expected


def _weighted_error(x, unit, codes, scale, zero=0):
    """Of one group, with exact fractions, as a part of the weighted square of the weights."""
    x = [int(value) for value in x]
    rms = int(np.sqrt(float(sum(v * v for v in x) // len(x))))
    step = Fraction(float(bfloat16.to_float32(np.array([scale]))[0])) / Fraction(float(unit))
    error = weight = Fraction(0)
    for v, code in zip(x, codes, strict=True):
        w = min(rms + abs(v), 2**18 - 1)
        error += w * (v - (int(code) - int(zero)) * step) ** 2
        weight += w * v * v
    return error / max(weight, 1)


_MAGNITUDES = st.sampled_from(sorted(set(fp8.E4M3_INTS[:127].tolist())))
_GROUP = st.one_of(
    st.lists(_MAGNITUDES, min_size=32, max_size=32),
    st.lists(_MAGNITUDES.map(lambda m: -m), min_size=32, max_size=32),
    st.lists(st.tuples(_MAGNITUDES, st.booleans()).map(lambda p: p[0] * (-1) ** p[1]), min_size=32, max_size=32),
    st.lists(st.integers(-100, 60), min_size=32, max_size=32),
    st.tuples(st.integers(-229376, 229376), st.integers(0, 31)).map(
        lambda p: [p[0] * (i == p[1]) + 9 for i in range(32)]
    ),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(group=_GROUP, exponent=st.integers(-110, 20))
def test_no_group_is_worse_than_by_the_symmetric_search(group, exponent):
    """But for the rounding of the two sums that are compared, a few parts in 2**52."""
    ints = np.array([np.clip(group, -229376, 229376)], np.int32)
    unit = np.array([[2.0**exponent * 1.7]])
    codes, scale, zero = quantize_search(ints, unit, group_size=32)
    by_search, search_scale = search.quantize_search(ints, unit, group_size=32, signed=False)
    error = _weighted_error(ints[0], unit[0, 0], codes[0], scale[0, 0], zero[0, 0])
    assert error <= _weighted_error(ints[0], unit[0, 0], by_search[0], search_scale[0, 0]) + Fraction(1, 2**49)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(group=_GROUP, exponent=st.integers(-110, 20))
def test_error_is_at_most_half_a_step_unless_clamped(group, exponent):
    ints = np.array([np.clip(group, -229376, 229376)], np.int32)
    unit = np.array([[2.0**exponent * 1.7]])
    codes, scale, zero = quantize_search(ints, unit, group_size=32)
    step = float(bfloat16.to_float32(scale)[0, 0])
    assert 2.0**-126 <= step < np.inf
    position = ints * unit[0, 0] / step + zero
    free = (position >= -8.5) & (position <= 7.5)
    # float32 rounds the factor and the product: 2**-23 of 15 steps
    assert (np.abs(position - codes)[free] <= 0.5 + 2.0**-19).all()
    assert (codes[position < -8.5] == -8).all()
    assert (codes[position > 7.5] == 7).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("group_size", GROUPS)
def test_a_group_of_one_sign_uses_all_levels(group_size, sign):
    """A ramp from zero: the error of sixteen levels, not of eight."""
    ints = sign * np.arange(group_size, dtype=np.int32)[None] * 1000
    codes, scale, zero = quantize_search(ints, np.ones((1, 1)), group_size=group_size)
    assert set(codes[0].tolist()) == set(range(-8, 8))
    assert zero[0, 0] == (-8 if sign > 0 else 7)
    decoded = (codes - zero) * bfloat16.to_float32(scale)
    assert np.abs(decoded - ints).max() <= 0.55 * (group_size - 1) * 1000 / 15


@pytest.mark.parametrize("value", [1, -3, 229376, -229376])
@pytest.mark.parametrize("group_size", GROUPS)
def test_a_group_of_one_value_is_as_near_as_bf16(group_size, value):
    codes, scale, zero = quantize_search(
        np.full((1, group_size), value, np.int32), np.full((1, 1), 2.0**-9), group_size=group_size
    )
    decoded = (codes - zero) * bfloat16.to_float32(scale).astype(np.float64) * 512
    assert np.abs(decoded - value).max() <= abs(value) * 2.0**-8


def test_a_single_outlier_is_kept():
    ints = np.resize([900, -1100, 700, -500], (2, 128)).astype(np.int32)
    ints[0, 77], ints[1, 77] = 229376, -229376
    codes, scale, zero = quantize_search(ints, np.ones((2, 1)), group_size=128)
    decoded = (codes - zero) * bfloat16.to_float32(scale)
    assert np.abs(decoded[:, 77] - ints[:, 77]).max() < 0.01 * 229376


def test_the_largest_of_everything_stays_within_the_bit_budget():
    ints = np.full((2, 128), fp8.E4M3_INTS.max(), np.int32)
    ints[0, ::2] *= -1
    levels = np.full(128, MAX_IMPORTANCE, np.uint16)
    for importance in (None, levels):
        codes, _, zero = quantize_search(ints, np.full((2, 1), 2.0**-9), group_size=128, importance_C=importance)
        assert (np.abs(codes[0].astype(int) - zero[0]) >= 7).all()
        assert len(set(codes[1].tolist())) == 1


@pytest.mark.parametrize("unit", [2.0**127, 1e36])
def test_scales_never_overflow(unit):
    codes, scale, _ = quantize_search(np.full((1, 32), 229376, np.int32), np.full((1, 1), unit), group_size=32)
    assert scale.tolist() == [[0x7F7F]]
    assert (codes == 7).all()


@pytest.mark.parametrize(("value", "unit"), [(0, 0.0), (0, 1.0), (5, 0.0)])
def test_zero_group_has_codes_zero_and_the_scale_of_absmax(value, unit):
    codes, scale, zero = quantize_search(np.full((1, 32), value, np.int32), np.full((1, 1), unit), group_size=32)
    assert not codes.any()
    assert not zero.any()
    assert scale.tolist() == [[absmax.ZERO_GROUP_SCALE]]


def test_scale_is_never_below_the_smallest_normal():
    codes, scale, zero = quantize_search(np.full((1, 32), 8, np.int32), np.full((1, 1), 1e-46), group_size=32)
    assert scale.tolist() == [[0x0080]]
    assert (codes == zero).all()


@pytest.mark.parametrize("group_size", GROUPS)
def test_importance_lowers_the_error_that_it_weighs(group_size):
    rng = np.random.default_rng(2)
    values = rng.standard_normal((64, 512)).astype(np.float32)
    moments = np.exp(rng.standard_normal(512) * 2)
    ints, unit = value_grid(values, group_size=group_size)
    errors = []
    for importance in (None, importance_levels(moments, group_size=group_size)):
        codes, scale, zero = quantize_search(ints, unit, group_size=group_size, importance_C=importance)
        decoded = (codes - zero.repeat(group_size, 1)) * bfloat16.to_float32(scale).repeat(group_size, 1)
        errors.append(float((((decoded - values) ** 2) * moments).sum()))
    assert errors[1] < 0.9 * errors[0]


def test_errors_are_those_of_the_decoded_weights():
    rng = np.random.default_rng(5)
    values = rng.standard_normal((5, 128)).astype(np.float32)
    codes, scale, zero = quantize_search(*value_grid(values, group_size=32), group_size=32)
    decoded = (codes - zero.repeat(32, 1)) * bfloat16.to_float32(scale).repeat(32, 1)
    error2, _ = metrics.error_rows(values, codes, scale, 32, zero)
    assert np.allclose(error2, ((decoded - values.astype(np.float64)) ** 2).sum(-1), rtol=1e-12)


@pytest.mark.parametrize(
    ("group_size", "gauss", "shifted"), [(32, 0.0773, 0.0691), (64, 0.0876, 0.0784), (128, 0.0960, 0.0856)]
)
def test_errors_of_gaussian_weights(group_size, gauss, shifted, fp8_weight):
    """Of weights around zero, and of groups around a value of their own."""
    rng = np.random.default_rng(7)
    weight = rng.standard_normal((256, 1024)).astype(np.float32)
    means = rng.standard_normal((256, 1024 // group_size)).repeat(group_size, 1).astype(np.float32)
    errors = []
    for source in (weight, weight + means / 2):
        codes_RC, scale_BB = fp8_weight(source)
        ints, unit = fp8_grid(codes_RC, scale_BB, block=(128, 128), group_size=group_size)
        codes, scale, zero = quantize_search(ints, unit, group_size=group_size)
        values = fp8.dequantize(codes_RC, scale_BB, block=(128, 128))
        error2, square = metrics.error_rows(values, codes, scale, group_size, zero)
        errors.append(float(np.sqrt(error2.sum() / square.sum())))
    assert errors[0] <= gauss
    assert errors[1] <= shifted


@pytest.mark.parametrize("group_size", GROUPS)
def test_bytes_are_golden(group_size):
    """A change of these bytes is a change of the product."""
    mixed = (np.arange(16 * 512, dtype=np.uint64) * np.uint64(2654435761)) >> np.uint64(7)
    codes = (mixed & np.uint64(255)).astype(np.uint8).reshape(16, 512)
    codes[(codes & 0x7F) == 0x7F] = 0
    codes[::3, :256] &= 0x7F
    scale_BB = (np.arange(1, 9, dtype=np.float32) / 1024).reshape(2, 4)
    ints, unit = fp8_grid(codes, scale_BB, block=(8, 128), group_size=group_size)
    int4, scale, zero = quantize_search(ints, unit, group_size=group_size)
    stored = packing.pack_int4(int4).astype("<i4").tobytes() + scale.astype("<u2").tobytes()
    digest = hashlib.sha256(stored + packing.pack_rows_int4(zero).astype("<i4").tobytes())
    assert digest.hexdigest() == GOLDEN["zero_points_sha256"][f"g{group_size}"]
