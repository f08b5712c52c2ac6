import os
import subprocess
import sys

import numpy as np
import pytest

from quantkit.numerics import absmax, bfloat16, fp8, fused_cpu, grid, kernel_cache, metrics, packing, search

GROUPS = (32, 64, 128)
MODES = (("search", True), ("search", False), ("absmax", True))
SEARCH = {"group_size": 32, "scales": "search", "signed": True}
# square, ragged, per channel, per tensor, MXFP8, and two that no group divides
BLOCKS = ((128, 128), (1, 640), (400, 640), (1, 32), (24, 96), (7, 20))


def _spec_fp8(codes, scale_BB, where, options):
    group_size = options["group_size"]
    if options["scales"] == "absmax":
        values = fp8.dequantize(codes, scale_BB, **where)
        int4, scale = absmax.quantize_absmax(bfloat16.from_float32(values), group_size=group_size)
    else:
        ints, unit = grid.fp8_grid(codes, scale_BB, **where, group_size=group_size)
        int4, scale = search.quantize_search(ints, unit, group_size=group_size, signed=options["signed"])
    return packing.pack_int4(int4), scale


def _spec_values(values, *, group_size, scales, signed):
    wide = bfloat16.to_float32(values) if values.dtype == np.uint16 else values
    if scales == "absmax":
        int4, scale = absmax.quantize_absmax(bfloat16.from_float32(wide), group_size=group_size)
    else:
        ints, unit = grid.value_grid(wide, group_size=group_size)
        int4, scale = search.quantize_search(ints, unit, group_size=group_size, signed=signed)
    return packing.pack_int4(int4), scale


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_fp8_gives_the_bytes_of_the_specification(rows, block, group_size, random_fp8, assert_same_bytes):
    codes, scale_BB = random_fp8(rows, 640, block, row_offset=37)
    where = {"block": block, "row_offset": 37}
    values = fp8.dequantize(codes, scale_BB, **where)
    for scales, signed in MODES:
        options = {"group_size": group_size, "scales": scales, "signed": signed}
        expected = _spec_fp8(codes, scale_BB, where, options)
        packed, scale = fused_cpu.quantize_fp8(codes, scale_BB, **where, **options)
        assert_same_bytes(f"{scales} packed", expected[0], packed)
        assert_same_bytes(f"{scales} scale", expected[1], scale)
        sums = fused_cpu.error_rows_fp8(codes, scale_BB, packed, scale, **where, group_size=group_size)
        for want, got in zip(
            metrics.error_rows(values, packing.unpack_int4(packed, values.shape[1]), scale, group_size),
            sums,
            strict=True,
        ):
            assert_same_bytes("error", want, got)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 128), (5, 384), (40, 2048)])
def test_importance_gives_the_bytes_of_the_specification(rows, cols, group_size, signed, random_fp8, assert_same_bytes):
    """Rows that a tile of 16 groups reaches beyond, and rows of many tiles."""
    rng = np.random.default_rng(4)
    codes, scale_BB = random_fp8(rows, cols, (128, 128))
    moments = np.exp(rng.uniform(-12, 3, cols)) * (rng.random(cols) > 0.1)
    moments[:group_size] = 0.0
    levels = search.importance_levels(moments, group_size=group_size)
    options = {"group_size": group_size, "signed": signed, "importance_C": levels}
    by_numba = options | {"scales": "search"}
    ints, unit = grid.fp8_grid(codes, scale_BB, block=(128, 128), group_size=group_size)
    wanted, wanted_scale = search.quantize_search(ints, unit, **options)
    packed, scale = fused_cpu.quantize_fp8(codes, scale_BB, block=(128, 128), **by_numba)
    assert_same_bytes("packed", packing.pack_int4(wanted), packed)
    assert_same_bytes("scale", wanted_scale, scale)
    values = fp8.dequantize(codes, scale_BB, block=(128, 128))
    ints, unit = grid.value_grid(values, group_size=group_size)
    wanted, wanted_scale = search.quantize_search(ints, unit, **options)
    packed, scale = fused_cpu.quantize_values(values, **by_numba)
    assert_same_bytes("packed", packing.pack_int4(wanted), packed)
    assert_same_bytes("scale", wanted_scale, scale)


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("kind", ["bf16", "f32"])
def test_values_give_the_bytes_of_the_specification(kind, group_size, assert_same_bytes):
    rng = np.random.default_rng(3)
    for rows, cols in ((1, group_size), (7, 640), (60, 128), (3, 2048)):
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        values *= np.exp(rng.uniform(-80, 80, (rows, cols // 32))).astype(np.float32).repeat(32, 1)
        values[rng.random((rows, cols // 32)).repeat(32, 1) < 0.1] = -0.0
        values[-1, :32] = np.float32(1e-44) * rng.integers(-9, 9, 32).astype(np.float32)
        source = bfloat16.from_float32(values) if kind == "bf16" else values
        wide = bfloat16.to_float32(source) if kind == "bf16" else source
        for scales, signed in MODES:
            options = {"group_size": group_size, "scales": scales, "signed": signed}
            expected = _spec_values(source, **options)
            packed, scale = fused_cpu.quantize_values(source, **options)
            assert_same_bytes(f"{scales} packed", expected[0], packed)
            assert_same_bytes(f"{scales} scale", expected[1], scale)
            sums = fused_cpu.error_rows_values(source, packed, scale, group_size=group_size)
            for want, got in zip(
                metrics.error_rows(wide, packing.unpack_int4(packed, wide.shape[1]), scale, group_size),
                sums,
                strict=True,
            ):
                assert_same_bytes("error", want, got)


@pytest.mark.parametrize("scales", ["search", "absmax"])
@pytest.mark.parametrize("magnitude", [1e-44, 1e-37, 1e34])
def test_extreme_scales_give_the_bytes_of_the_specification(magnitude, scales, random_fp8, assert_same_bytes):
    codes, _ = random_fp8(16, 256, (128, 128))
    scale_BB = np.full((1, 2), magnitude, np.float32)
    where = {"block": (128, 128), "row_offset": 0}
    options = {"group_size": 32, "scales": scales, "signed": True}
    expected = _spec_fp8(codes, scale_BB, where, options)
    packed, scale = fused_cpu.quantize_fp8(codes, scale_BB, **where, **options)
    assert_same_bytes("packed", expected[0], packed)
    assert_same_bytes("scale", expected[1], scale)


@pytest.mark.parametrize("code", [0x00, 0x42])
def test_zero_scale_makes_a_zero_group(code):
    codes, scale_BB = np.full((4, 256), code, np.uint8), np.zeros((1, 2), np.float32)
    for scales, signed in MODES:
        packed, scale = fused_cpu.quantize_fp8(
            codes, scale_BB, block=(128, 128), group_size=64, scales=scales, signed=signed
        )
        assert (packed.view(np.uint32) == 0x88888888).all()
        assert (scale == absmax.ZERO_GROUP_SCALE).all()


@pytest.mark.parametrize("scales", ["search", "absmax"])
def test_ties_of_bf16_give_the_bytes_of_the_specification(scales, assert_same_bytes):
    # 14 steps of 2**-9 in code 7: the INT4 scale is a power of two times the FP8 scale, midway in BF16
    codes = np.zeros((2, 512), np.uint8)
    codes[:, ::128] = [[0x0E], [0x8E]]
    codes[:, 1::128] = 0x08
    scale_BB = np.float32(1) + np.array([[1, 3, 5, 7]], np.float32) / np.float32(256)
    where = {"block": (128, 128), "row_offset": 0}
    options = {"group_size": 128, "scales": scales, "signed": True}
    for source in (codes, np.where(codes == 0x08, 0, codes).astype(np.uint8)):
        expected = _spec_fp8(source, scale_BB, where, options)
        packed, scale = fused_cpu.quantize_fp8(source, scale_BB, **where, **options)
        assert_same_bytes("packed", expected[0], packed)
        assert_same_bytes("scale", expected[1], scale)
        values = bfloat16.from_float32(fp8.dequantize(source, scale_BB, **where))
        assert_same_bytes("values", values, fused_cpu.dequantize_fp8(source, scale_BB, **where))


@pytest.mark.parametrize("rows_per_block", [1, 7, 16, 64])
@pytest.mark.parametrize("scales", ["search", "absmax"])
def test_row_blocks_do_not_change_bytes(rows_per_block, scales, random_fp8, assert_same_bytes):
    codes, scale_BB = random_fp8(200, 384, (128, 128))
    options = {"block": (128, 128), "group_size": 32, "scales": scales, "signed": True}
    whole = fused_cpu.quantize_fp8(codes, scale_BB, **options)
    parts = [
        fused_cpu.quantize_fp8(codes[start : start + rows_per_block], scale_BB, row_offset=start, **options)
        for start in range(0, 200, rows_per_block)
    ]
    assert_same_bytes("packed", whole[0], np.concatenate([packed for packed, _ in parts]))
    assert_same_bytes("scale", whole[1], np.concatenate([scale for _, scale in parts]))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 640), (130, 300), (40, 129)])
@pytest.mark.parametrize("block", [(128, 128), (1, 1000), (1, 32), (5, 3)])
def test_dequantize_gives_the_bytes_of_the_specification(shape, block, random_fp8, assert_same_bytes):
    codes, scale_BB = random_fp8(*shape, block, row_offset=9)
    scale_BB[0, 0] = np.float32(1e38)  # overflows to infinity
    where = {"block": block, "row_offset": 9}
    expected = bfloat16.from_float32(fp8.dequantize(codes, scale_BB, **where))
    assert_same_bytes("values", expected, fused_cpu.dequantize_fp8(codes, scale_BB, **where))


def test_read_only_unaligned_and_strided_inputs_give_the_same_bytes(assert_same_bytes):
    values = np.random.default_rng(0).standard_normal((9, 256)).astype(np.float32)
    expected = fused_cpu.quantize_values(values, **SEARCH)
    raw = np.zeros(values.nbytes + 1, np.uint8)
    raw[1:] = values.reshape(-1).view(np.uint8)
    unaligned = raw[1:].view(np.float32).reshape(9, 256)
    unaligned.flags.writeable = False
    for source in (unaligned, np.repeat(values, 2, 0)[::2], np.asfortranarray(values)):
        got = fused_cpu.quantize_values(source, **SEARCH)
        assert_same_bytes("packed", expected[0], got[0])
        assert_same_bytes("scale", expected[1], got[1])
    assert values.flags.writeable
    assert len(fused_cpu.quantize_tiles.signatures) == 1


def test_empty_matrices_give_empty_results():
    packed, scale = fused_cpu.quantize_fp8(
        np.zeros((0, 128), np.uint8), np.zeros((0, 1), np.float32), block=(128, 128), **SEARCH
    )
    assert (packed.shape, scale.shape) == ((0, 16), (0, 4))
    err2, _ = fused_cpu.error_rows_values(np.zeros((0, 128), np.float32), packed, scale, group_size=32)
    assert err2.shape == (0,)
    values = fused_cpu.dequantize_fp8(np.zeros((0, 128), np.uint8), np.zeros((0, 1), np.float32), block=(1, 128))
    assert values.shape == (0, 128)


def _run(code, **environment):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


_DECODE_ONE = (
    "import numpy as np\n"
    "from quantkit.numerics import fused_cpu, kernel_cache\n"
    "codes = np.ones((1, 32), np.uint8)\n"
    "print(fused_cpu.dequantize_fp8(codes, np.ones((1, 1), np.float32), block=(128, 128))[0, 31])\n"
)


def test_kernels_compile_where_no_cache_can_be_written():
    refuse = "import tempfile\ndef refuse(**_): raise PermissionError('read-only')\ntempfile.TemporaryFile = refuse\n"
    result = _run(refuse + _DECODE_ONE + "print(kernel_cache._DIRECTORY)")
    assert result.stdout == f"{(127 - 9) << 7}\nNone\n", result.stderr


def test_kernels_are_cached_under_the_digest_of_their_sources(tmp_path):
    result = _run(_DECODE_ONE, NUMBA_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "quantkit-kernels" / kernel_cache.source_digest()
    assert list(folder.rglob("*.nbc"))


def test_digest_changes_with_any_source(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
    digests = {kernel_cache.source_digest(tmp_path)}
    (tmp_path / "b.py").write_text("x = 2\n")
    digests.add(kernel_cache.source_digest(tmp_path))
    (tmp_path / "c.py").write_text("")
    digests.add(kernel_cache.source_digest(tmp_path))
    assert len(digests) == 3


def test_only_the_fused_path_imports_numba():
    modules = ("absmax", "bfloat16", "fp8", "grid", "metrics", "min_max", "packing", "search", "zero_points")
    imports = "".join(f"import quantkit.numerics.{module}\n" for module in modules)
    result = _run(f"import sys\n{imports}print({{'numba', 'torch'}} & set(sys.modules))")
    assert result.stdout == "set()\n", result.stderr
    result = _run("import sys, quantkit.numerics.fused_cpu\nprint('torch' in sys.modules)")
    assert result.stdout == "False\n", result.stderr


_LOOK_AT_THE_CODE = r"""
import re
import numpy as np
from llvmlite import binding
from quantkit.numerics import fused_cpu, fused_tiles

options = {"block": (128, 128), "group_size": 32, "scales": "search", "signed": True}
fused_cpu.quantize_fp8(np.ones((16, 512), np.uint8), np.ones((1, 4), np.float32), **options)
code = "\n".join(fused_tiles.quantize_tiles.inspect_llvm().values())
assert len(re.findall(r"fmul <16 x float>", code)) >= 4
if binding.get_host_cpu_features().get("avx512f"):
    assembly = "\n".join(fused_tiles.quantize_tiles.inspect_asm().values())
    for name in ("vmulps", "vrndscaleps", r"vfmadd\d+pd", "vcvttps2dq"):
        assert re.search(name + r"\s.*%zmm", assembly), name
"""


def test_the_search_runs_on_vectors(tmp_path):
    """Sixteen lanes in the code that LLVM gets, and whole registers in what it makes of it where there are such."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}  # cached code cannot be looked at
    result = subprocess.run(
        [sys.executable, "-c", _LOOK_AT_THE_CODE], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
