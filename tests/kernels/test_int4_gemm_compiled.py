"""The products as the assembler makes them for sm_90: instructions a weight, against what memory leaves room for."""

import re

import pytest

from tests.kernels.sm90 import compile_kernel

MOST_PER_WEIGHT = 4.2  # an H200 may issue 3.6 to 3.9 at the speed of its memory, counted at 1.755 GHz
SIGNATURE = {"x_ptr": "*bf16", "words_ptr": "*i32", "scale_ptr": "*bf16", "out_ptr": "*bf16", "num_tokens": "i32"}


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize(("block_n", "block_m"), [(128, 8), (128, 16), (128, 32), (64, 16)])
def test_the_main_loop_keeps_up_with_memory(block_n, block_m, group_size, tmp_path):
    constants = {
        "N": 4096,
        "K": 6144,
        "GROUP": group_size,
        "BLOCK_N": block_n,
        "BLOCK_M": block_m,
        "SPLIT_K": 1,
        "WARPS": 4,
        "IS_REPACKED": True,
        "INTERPRET": False,
    }
    compiled = compile_kernel(
        "quantkit_kernels.gemm_jit:gemm_kernel", SIGNATURE, constants, tmp_path, num_warps=4, num_stages=4
    )
    assert compiled.stack_bytes == 0
    assert "wgmma.mma_async" in compiled.ptx
    # decoded weights never pass through shared memory, nor between the lanes of a warp; scales may
    assert len(re.findall(r"^\s*(?:STS|STSM|SHFL)", "\n".join(compiled.loop), re.MULTILINE)) <= 2
    assert len(compiled.loop) * 32 * 4 / (block_n * 128) <= MOST_PER_WEIGHT
