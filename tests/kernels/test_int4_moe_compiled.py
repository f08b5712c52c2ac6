"""The products of the experts as the assembler makes them for sm_90: GLM-5.2 at TP8 and Kimi-K2 at TP8."""

import pytest

from quantkit_kernels.tiles import MoeShape, moe_tile
from tests.kernels.sm90 import compile_kernel

KERNELS = "quantkit_kernels.moe_jit:"
MOST_PER_WEIGHT = 4.2
BLOCKS = {
    "pairs_ptr": "*i32",
    "experts_ptr": "*i32",
    "map_ptr": "*i32",
    "num_blocks_ptr": "*i32",
    "num_pairs": "i32",
    "num_global": "i32",
}
WEIGHT = {"words_ptr": "*i32", "scale_ptr": "*bf16", "out_ptr": "*bf16"}
GLM = {"num_cols": 6144, "num_experts": 256}
KIMI = {"num_cols": 7168, "num_experts": 384}


def check(compiled, weights_per_step):
    assert compiled.stack_bytes == 0
    assert "wgmma.mma_async" in compiled.ptx
    # decoded weights never pass through shared memory, nor between the lanes of a warp; scales may
    assert compiled.num_exchanges <= 4
    assert compiled.per_weight(weights_per_step) <= MOST_PER_WEIGHT


@pytest.mark.parametrize(
    ("model", "group_size", "num_tokens"),
    [(GLM, 32, 1), (GLM, 32, 512), (GLM, 32, 4096), (GLM, 128, 64), (KIMI, 32, 1), (KIMI, 32, 64), (KIMI, 32, 512)],
)
def test_main_loops_keep_up_with_memory(model, group_size, num_tokens, tmp_path):
    """GLM with every expert here, Kimi-K2 with a map of those that are."""
    shape = MoeShape(model["num_experts"], 256, model["num_cols"], group_size, 8)
    tile = moe_tile(shape, num_tokens=num_tokens)
    common = {
        "NUM_EXPERTS": model["num_experts"],
        "GROUP": group_size,
        "BLOCK_M": tile.block_m,
        "WARPS": tile.num_warps,
        "IS_SORTED": tile.is_sorted,
        "HAS_MAP": model is KIMI,
        "IS_REPACKED": True,
        "INTERPRET": False,
    }
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    out = {"out_ptr": "*fp32"} if tile.split_k > 1 else {}
    sizes = {"I": 256, "K": model["num_cols"], "TOP_K": 8, "BLOCK_N": tile.gate_up_n, "SPLIT_K": tile.split_k}
    signature = {"x_ptr": "*bf16"} | WEIGHT | BLOCKS | out
    compiled = compile_kernel(KERNELS + "gate_up_kernel", signature, common | sizes, tmp_path, **options)
    check(compiled, 2 * tile.gate_up_n * 128)
    sizes = {"N": model["num_cols"], "K": 256, "BLOCK_N": tile.down_n}
    signature = {"hidden_ptr": "*bf16", "weights_ptr": "*fp32"} | WEIGHT | BLOCKS
    compiled = compile_kernel(KERNELS + "down_kernel", signature, common | sizes, tmp_path, **options)
    check(compiled, tile.down_n * 128)


def test_sorting_is_one_kernel_without_a_stack(tmp_path):
    constants = {"NUM_EXPERTS": 384, "NUM_BINS": 512, "BLOCK_M": 16, "CHUNK": 1024, "HAS_MAP": True}
    pointers = {"ids_ptr": "*i64", "map_ptr": "*i32", "pairs_ptr": "*i32", "experts_ptr": "*i32"}
    signature = pointers | {"num_blocks_ptr": "*i32", "num_pairs": "i32", "num_global": "i32"}
    compiled = compile_kernel(
        "quantkit_kernels.moe_align_jit:align_kernel", signature, constants, tmp_path, num_warps=4
    )
    assert compiled.stack_bytes == 0
