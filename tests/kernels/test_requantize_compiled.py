"""The conversion kernels as the assembler makes them for sm_90: nothing is spilled, and nothing fused."""

import pytest

from quantkit_kernels import requantize
from quantkit_kernels.requantize_jit import FP8_CODES, FP8_VALUES, VALUES
from tests.kernels.sm90 import compile_kernel

KERNELS = "quantkit_kernels.requantize_jit:"
SOURCE = {
    "source_ptr": "*u8",
    "scale_ptr": "*fp32",
    "num_cols": "i32",
    "row_offset": "i32",
    "block_rows": "i32",
    "block_cols": "i32",
    "scale_cols": "i32",
}
INT4 = {"packed_ptr": "*i32", "int4_scale_ptr": "*i16"}


MOST_PER_WEIGHT = {True: 15.0, False: 24.0}  # room at 70 % of the bandwidth of an H200: 1.56 and 2.56 bytes a weight


def check(compiled):
    assert compiled.stack_bytes == 0
    assert compiled.num_fused == 0
    assert compiled.sass


@pytest.mark.parametrize(
    ("kind", "pointer", "group_size", "step"),
    [
        (FP8_CODES, "*u8", 32, 32),
        (FP8_CODES, "*u8", 128, 128),
        (FP8_VALUES, "*u8", 64, 1),
        (VALUES, "*bf16", 32, 1),
        (VALUES, "*fp32", 128, 1),
    ],
)
def test_quantization_fits_into_registers(kind, pointer, group_size, step, tmp_path):
    constants = {
        "KIND": kind.value,
        "SCALE_STEP": step,
        "GROUP": group_size,
        "BLOCK_G": requantize.WEIGHTS_PER_PROGRAM // group_size,
        "CANDIDATES": requantize.CANDIDATES[group_size],
        "SIGNED": True,
        "HAS_IMPORTANCE": True,
    }
    signature = SOURCE | {"source_ptr": pointer, "importance_ptr": "*i32"} | INT4 | {"num_groups": "i32"}
    check(compile_kernel(KERNELS + "search_kernel", signature, constants, tmp_path, **requantize.OPTIONS))


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("is_fp8", [True, False], ids=["fp8", "bf16"])
def test_absmax_keeps_up_with_memory(is_fp8, group_size, tmp_path):
    numbers = ("num_rows", "num_cols", "row_offset", "rows_per_program", "scale_cols")
    signature = {"source_ptr": "*i64", "scale_ptr": "*fp32"} | INT4 | dict.fromkeys(numbers, "i32")
    constants = {
        "IS_FP8": is_fp8,
        "BLOCK_ROWS": 128,
        "BLOCK_COLS": 128,
        "GROUP": group_size,
        "TILE_G": requantize.ABSMAX_WEIGHTS // group_size,
        "INTERPRET": False,
    }
    kernel = "quantkit_kernels.absmax_jit:absmax_kernel"
    compiled = compile_kernel(kernel, signature, constants, tmp_path, **requantize.ABSMAX_OPTIONS)
    assert compiled.stack_bytes == 0
    assert compiled.num_fused == compiled.ptx.count("fma.rn.bf16x2")  # those of the assembly, on purpose
    per_weight = compiled.per_weight(requantize.ABSMAX_WEIGHTS, requantize.ABSMAX_OPTIONS["num_warps"])
    assert per_weight <= MOST_PER_WEIGHT[is_fp8]


@pytest.mark.parametrize("group_size", [32, 128])
def test_errors_fit_into_registers(group_size, tmp_path):
    constants = {
        "KIND": FP8_VALUES.value,
        "SCALE_STEP": group_size,
        "GROUP": group_size,
        "BLOCK_G": requantize.ERROR_GROUPS,
    }
    signature = SOURCE | INT4 | {"sums_ptr": "*fp64", "num_groups": "i32"}
    check(compile_kernel(KERNELS + "error_kernel", signature, constants, tmp_path, **requantize.OPTIONS))


def test_the_check_sees_what_is_fused(tmp_path):
    """Without the option this kernel fuses: it would give other bytes than the CPU."""
    constants = {"KIND": FP8_VALUES.value, "SCALE_STEP": 32, "GROUP": 32, "BLOCK_G": requantize.ERROR_GROUPS}
    signature = SOURCE | INT4 | {"sums_ptr": "*fp64", "num_groups": "i32"}
    options = requantize.OPTIONS | {"enable_fp_fusion": True}
    compiled = compile_kernel(KERNELS + "error_kernel", signature, constants, tmp_path, **options)
    assert compiled.num_fused > 0 or any("DFMA" in text for _, text in compiled.sass)
