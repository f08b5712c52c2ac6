"""What the usual Triton W4A16 costs for sm_90, in instructions a weight: the figures that the README quotes."""

import pytest

from tests.kernels.sm90 import compile_kernel

NAIVE = "scripts.naive_w4a16:"
POINTERS = {"x_ptr": "*bf16", "bytes_ptr": "*u8", "scale_ptr": "*bf16"}
SIZES = {"num_rows": "i32", "num_cols": "i32"}
COMMON = {"GROUP": 32, "IS_EVEN": True, "INTERPRET": False}
FEWEST, MOST = 18, 24  # with Triton 3.9: 17.8, 22.4 and 24.3


def check(compiled, block_n, block_k):
    assert compiled.stack_bytes == 0
    assert FEWEST <= round(compiled.per_weight(block_n * block_k)) <= MOST


def test_the_usual_product(tmp_path):
    signature = POINTERS | {"out_ptr": "*bf16", "num_tokens": "i32"} | SIZES
    constants = COMMON | {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64}
    check(compile_kernel(NAIVE + "_naive_kernel", signature, constants, tmp_path, num_warps=4), 64, 64)


@pytest.mark.parametrize("block_m", [16, 64])
def test_the_usual_experts(block_m, tmp_path):
    blocks = {"pairs_ptr": "*i32", "experts_ptr": "*i32", "num_blocks_ptr": "*i32", "num_pairs": "i32"}
    signature = POINTERS | {"weights_ptr": "*fp32", "out_ptr": "*bf16"} | blocks | SIZES
    block_n, block_k = (32, 64) if block_m == 16 else (64, 32)
    constants = COMMON | {"PER_TOKEN": 1, "IS_WEIGHTED": True, "BLOCK_M": block_m, "BLOCK_N": block_n}
    constants |= {"BLOCK_K": block_k}
    check(compile_kernel(NAIVE + "_naive_moe_kernel", signature, constants, tmp_path, num_warps=4), block_n, block_k)
