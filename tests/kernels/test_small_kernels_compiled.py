"""Kernels that only add or decode compile for sm_90 without a stack: the interpreter takes what Triton refuses."""

import pytest

from tests.kernels.sm90 import compile_kernel

PARTS = {"parts_ptr": "*fp32", "out_ptr": "*bf16"}
WEIGHT = {"words_ptr": "*i32", "scale_ptr": "*bf16", "out_ptr": "*bf16"}
KERNELS = {
    "requantize_jit:row_kernel": (
        {"sums_ptr": "*fp64", "rows_ptr": "*fp64", "num_rows": "i32", "groups_per_row": "i32", "num_groups": "i32"},
        {"BLOCK_R": 128},
    ),
    "gemm_jit:sum_splits_kernel": (PARTS | {"num_items": "i32"}, {"SPLIT_K": 4, "BLOCK": 1024, "INTERPRET": False}),
    "gemm_jit:dequantize_kernel": (
        WEIGHT,
        {"N": 512, "K": 6144, "GROUP": 32, "BLOCK_N": 64, "WARPS": 4, "IS_REPACKED": True, "INTERPRET": False},
    ),
    "moe_jit:silu_kernel": (
        PARTS | {"num_pairs": "i32"},
        {"I": 256, "SPLIT_K": 4, "BLOCK": 1024, "INTERPRET": False},
    ),
    "moe_jit:sum_kernel": (
        {"parts_ptr": "*bf16", "ids_ptr": "*i64", "map_ptr": "*i32", "out_ptr": "*bf16", "num_global": "i32"},
        {"N": 6144, "NUM_EXPERTS": 256, "TOP_K": 8, "BLOCK": 1024, "HAS_MAP": True, "INTERPRET": False},
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_without_a_stack(name, tmp_path):
    signature, constants = KERNELS[name]
    compiled = compile_kernel(f"quantkit_kernels.{name}", signature, constants, tmp_path, num_warps=4)
    assert compiled.stack_bytes == 0
    assert compiled.sass
