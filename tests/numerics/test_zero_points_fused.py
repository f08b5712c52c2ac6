import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.numerics import bfloat16, fp8, fused_cpu, fused_zero_points, grid, metrics, min_max, packing, zero_points
from quantkit.numerics.search import importance_levels

GROUPS = (32, 64, 128)
# square, ragged, per channel, per tensor, MXFP8, and two that no group divides
BLOCKS = ((128, 128), (1, 640), (400, 640), (1, 32), (24, 96), (7, 20))
PARTS = ("packed", "scale", "zero")


def _packed(codes, scale, zero):
    return packing.pack_int4(codes), scale, zero


def _spec_values(values, group_size, scales, importance=None):
    wide = bfloat16.to_float32(values) if values.dtype == np.uint16 else values
    if scales == "absmax":
        return _packed(*min_max.quantize_min_max(bfloat16.from_float32(wide), group_size=group_size))
    ints, unit = grid.value_grid(wide, group_size=group_size)
    return _packed(*zero_points.quantize_search(ints, unit, group_size=group_size, importance_C=importance))


def _spec_fp8(codes, scale_BB, where, group_size, scales, importance=None):
    if scales == "absmax":
        return _spec_values(fp8.dequantize(codes, scale_BB, **where), group_size, scales)
    ints, unit = grid.fp8_grid(codes, scale_BB, **where, group_size=group_size)
    return _packed(*zero_points.quantize_search(ints, unit, group_size=group_size, importance_C=importance))


@pytest.fixture
def assert_same_parts(assert_same_bytes):
    def compare(label, expected, got):
        for part, want, have in zip(PARTS, expected, got, strict=True):
            assert_same_bytes(f"{label} {part}", want, have)

    return compare


@pytest.mark.parametrize("scales", ["search", "absmax"])
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rows", [1, 7, 150])
def test_fp8_gives_the_bytes_of_the_specification(
    rows, block, group_size, scales, random_fp8, assert_same_parts, assert_same_bytes
):
    codes, scale_BB = random_fp8(rows, 640, block, row_offset=37)
    where = {"block": block, "row_offset": 37}
    got = fused_zero_points.quantize_fp8(codes, scale_BB, **where, group_size=group_size, scales=scales)
    assert_same_parts(scales, _spec_fp8(codes, scale_BB, where, group_size, scales), got)
    packed, scale, zero = got
    values = fp8.dequantize(codes, scale_BB, **where)
    expected = metrics.error_rows(values, packing.unpack_int4(packed, 640), scale, group_size, zero)
    sums = fused_cpu.error_rows_fp8(codes, scale_BB, packed, scale, **where, group_size=group_size, zero_RG=zero)
    assert_same_bytes("error", expected[0], sums[0])
    assert_same_bytes("square", expected[1], sums[1])


@pytest.mark.parametrize("scales", ["search", "absmax"])
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("kind", ["bf16", "f32"])
def test_values_give_the_bytes_of_the_specification(kind, group_size, scales, assert_same_parts, assert_same_bytes):
    rng = np.random.default_rng(3)
    for rows, cols in ((1, group_size), (7, 640), (60, 128), (3, 2048)):
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        values += rng.standard_normal((rows, cols // 32)).repeat(32, 1).astype(np.float32)
        values *= np.exp(rng.uniform(-80, 80, (rows, cols // 32))).astype(np.float32).repeat(32, 1)
        values[rng.random((rows, cols // 32)).repeat(32, 1) < 0.1] = -0.0
        values[0, :32] = rng.choice([1.5e38, -1.5e38, 1.0], 32)
        values[-1, :32] = np.float32(1e-44) * rng.integers(-9, 9, 32).astype(np.float32)
        source = bfloat16.from_float32(values) if kind == "bf16" else values
        wide = bfloat16.to_float32(source) if kind == "bf16" else source
        packed, scale, zero = fused_zero_points.quantize_values(source, group_size=group_size, scales=scales)
        assert_same_parts(scales, _spec_values(source, group_size, scales), (packed, scale, zero))
        expected = metrics.error_rows(wide, packing.unpack_int4(packed, cols), scale, group_size, zero)
        sums = fused_cpu.error_rows_values(source, packed, scale, group_size=group_size, zero_RG=zero)
        assert_same_bytes("error", expected[0], sums[0])


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 128), (5, 384), (40, 2048)])
def test_importance_gives_the_bytes_of_the_specification(rows, cols, group_size, random_fp8, assert_same_parts):
    rng = np.random.default_rng(4)
    codes, scale_BB = random_fp8(rows, cols, (128, 128))
    where = {"block": (128, 128), "row_offset": 0}
    moments = np.exp(rng.uniform(-12, 3, cols)) * (rng.random(cols) > 0.1)
    moments[:group_size] = 0.0
    levels = importance_levels(moments, group_size=group_size)
    options = {"group_size": group_size, "scales": "search", "importance_C": levels}
    got = fused_zero_points.quantize_fp8(codes, scale_BB, **where, **options)
    assert_same_parts("fp8", _spec_fp8(codes, scale_BB, where, group_size, "search", levels), got)
    values = fp8.dequantize(codes, scale_BB, **where)
    got = fused_zero_points.quantize_values(values, **options)
    assert_same_parts("values", _spec_values(values, group_size, "search", levels), got)


_CODES = st.integers(0, 255).filter(lambda code: code & 0x7F != 0x7F)
_HOSTILE = st.one_of(
    st.lists(_CODES, min_size=128, max_size=128),
    st.lists(_CODES.map(lambda code: code & 0x7F), min_size=128, max_size=128),
    st.lists(_CODES.map(lambda code: code | 0x80), min_size=128, max_size=128),
    st.lists(st.sampled_from([0x00, 0x80, 0x01, 0x81]), min_size=128, max_size=128),
    st.lists(st.sampled_from([0x7E, 0xFE]), min_size=128, max_size=128),
    _CODES.map(lambda code: [code] * 128),
    st.tuples(_CODES, st.integers(0, 127)).map(lambda p: [p[0] if i == p[1] else 0x08 for i in range(128)]),
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    rows=st.lists(_HOSTILE, min_size=1, max_size=6),
    scale=st.sampled_from([0.0, 1e-45, 1e-44, 1e-39, 1e-37, 2.0**-20, 0.37, 1e5, 1e34, 3e38]),
    row_offset=st.integers(0, 300),
    block_rows=st.sampled_from([1, 2, 128]),
    group_size=st.sampled_from(GROUPS),
    scales=st.sampled_from(["search", "absmax"]),
)
def test_hostile_groups_give_the_bytes_of_the_specification(rows, scale, row_offset, block_rows, group_size, scales):
    codes = np.array(rows, np.uint8)
    if scales == "absmax" and scale > 1e35:  # decoded to infinity, which no source may hold
        scale = 1e35
    num_blocks = -(-(len(rows) + row_offset) // block_rows)
    scale_BB = np.full((num_blocks, 1), scale, np.float32)
    where = {"block": (block_rows, 128), "row_offset": row_offset}
    expected = _spec_fp8(codes, scale_BB, where, group_size, scales)
    got = fused_zero_points.quantize_fp8(codes, scale_BB, **where, group_size=group_size, scales=scales)
    for part, want, have in zip(PARTS, expected, got, strict=True):
        assert want.dtype == have.dtype, part
        assert (want == have).all(), part


@pytest.mark.parametrize("rows_per_block", [1, 7, 16, 64])
@pytest.mark.parametrize("scales", ["search", "absmax"])
def test_row_blocks_do_not_change_bytes(rows_per_block, scales, random_fp8, assert_same_parts):
    codes, scale_BB = random_fp8(200, 384, (128, 128))
    options = {"block": (128, 128), "group_size": 32, "scales": scales}
    whole = fused_zero_points.quantize_fp8(codes, scale_BB, **options)
    parts = [
        fused_zero_points.quantize_fp8(codes[start : start + rows_per_block], scale_BB, row_offset=start, **options)
        for start in range(0, 200, rows_per_block)
    ]
    assert_same_parts("blocks", whole, [np.concatenate(part) for part in zip(*parts, strict=True)])


def test_read_only_unaligned_and_strided_inputs_give_the_same_bytes(assert_same_parts):
    values = np.random.default_rng(0).standard_normal((9, 256)).astype(np.float32)
    options = {"group_size": 32, "scales": "search"}
    expected = fused_zero_points.quantize_values(values, **options)
    raw = np.zeros(values.nbytes + 1, np.uint8)
    raw[1:] = values.reshape(-1).view(np.uint8)
    unaligned = raw[1:].view(np.float32).reshape(9, 256)
    unaligned.flags.writeable = False
    for source in (unaligned, np.repeat(values, 2, 0)[::2], np.asfortranarray(values)):
        assert_same_parts("source", expected, fused_zero_points.quantize_values(source, **options))
    assert values.flags.writeable
    assert len(fused_zero_points.quantize_zero_tiles.signatures) == 1


def test_empty_matrices_give_empty_results():
    packed, scale, zero = fused_zero_points.quantize_values(
        np.zeros((0, 128), np.float32), group_size=32, scales="search"
    )
    assert (packed.shape, scale.shape, zero.shape) == ((0, 16), (0, 4), (0, 4))
    values = np.zeros((0, 128), np.float32)
    error2, _ = fused_cpu.error_rows_values(values, packed, scale, group_size=32, zero_RG=zero)
    assert error2.shape == (0,)
