"""The products as the assembler makes them for sm_90: instructions a weight, against what memory leaves room for."""

import pytest

from quantkit_kernels.tiles import LEAST_TOKENS
from tests.kernels.sm90 import compile_kernel

MOST_PER_WEIGHT = 4.2  # an H200 may issue 3.6 to 3.9 at the speed of its memory, counted at 1.755 GHz
MOST_AS_STORED = 5.2  # of words in a checkpoint's own order: what repacking is for
SIGNATURE = {"x_ptr": "*bf16", "words_ptr": "*i32", "scale_ptr": "*bf16", "out_ptr": "*bf16", "num_tokens": "i32"}


def compile_gemm(cache, *, group_size, block_n, block_m, is_repacked=True):
    constants = {
        "N": 4096,
        "K": 6144,
        "GROUP": group_size,
        "BLOCK_N": block_n,
        "BLOCK_M": block_m,
        "SPLIT_K": 1,
        "WARPS": 4,
        "IS_REPACKED": is_repacked,
        "INTERPRET": False,
    }
    kernel = "quantkit_kernels.gemm_jit:gemm_kernel"
    compiled = compile_kernel(kernel, SIGNATURE, constants, cache, num_warps=4, num_stages=4)
    assert compiled.stack_bytes == 0
    assert "wgmma.mma_async" in compiled.ptx
    return compiled


@pytest.mark.parametrize(
    ("block_n", "block_m", "group_size"),
    [
        (128, 8, 32),
        (128, 8, 128),
        (128, 16, 32),
        (128, 16, 64),
        (128, 16, 128),
        (128, 32, 32),
        (128, 64, 32),
        (128, 64, 128),
        (64, 16, 32),
    ],
)
def test_the_main_loop_keeps_up_with_memory(block_n, block_m, group_size, tmp_path):
    if block_m < LEAST_TOKENS:
        pytest.skip("this Triton has no such tile")
    compiled = compile_gemm(tmp_path, group_size=group_size, block_n=block_n, block_m=block_m)
    # decoded weights never pass through shared memory, nor between the lanes of a warp; scales may
    assert compiled.num_exchanges <= 2
    assert compiled.per_weight(block_n * 128) <= MOST_PER_WEIGHT


@pytest.mark.parametrize("group_size", [32, 128])
def test_words_as_stored_take_half_more(group_size, tmp_path):
    compiled = compile_gemm(tmp_path, group_size=group_size, block_n=128, block_m=16, is_repacked=False)
    assert compiled.per_weight(128 * 128) <= MOST_AS_STORED
