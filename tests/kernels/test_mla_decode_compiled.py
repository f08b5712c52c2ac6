"""The decode kernels as the assembler makes them for sm_90: tensor cores by the warp group, and nothing spilled.

What an H200 may issue at 4.3 TB/s and 1.755 GHz is 124 instructions for a token of 576 bytes, in proportion for others.
"""

import pytest

from quantkit_kernels import split_kv
from quantkit_kernels.tiles import LEAST_TOKENS, gqa_tile, mla_tile
from tests.kernels.sm90 import compile_kernel

POINTERS = {"page_table_ptr": "*i32", "seq_lens_ptr": "*i32", "lse_ptr": "*fp32"}
NUMBERS = {"score_scale": "fp32", "value_scale": "fp32", "max_pages": "i32", "num_splits": "i32"}
ROWS = {"bf16": (576, 576, 512, 0), "flat576": (576, 576, 512, 0), "dsa656": (656, 328, 264, 164)}
BYTES = {"bf16": 1152, "flat576": 576, "dsa656": 656}


def compile_tile(module, signature, constants, page_size, is_whole, tile, cache):
    constants = constants | {
        "PAGE_SIZE": page_size,
        "BLOCK_H": tile.block_heads,
        "BLOCK_T": tile.block_tokens,
        "IS_WHOLE": is_whole,
        "INTERPRET": False,
    }
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    signature = POINTERS | NUMBERS | {"out_ptr": "*bf16" if is_whole else "*fp32", "q_ptr": "*bf16"} | signature
    name = f"quantkit_kernels.{module}_jit:{module}_decode_kernel"
    return compile_kernel(name, signature, constants, cache, **options)


MOST_STACK = 0 if LEAST_TOKENS == 8 else 8  # an older Triton spills two registers of one variant


def check(compiled, tile, row_bytes):
    assert compiled.stack_bytes <= MOST_STACK
    assert "wgmma.mma_async" in compiled.ptx or tile.block_heads < LEAST_TOKENS
    assert len(compiled.loop) * tile.num_warps / tile.block_tokens <= 124 * row_bytes / 576


@pytest.mark.parametrize(("page_size", "is_whole"), [(64, True), (1, False)])
@pytest.mark.parametrize(("layout", "num_heads"), [("bf16", 16), ("flat576", 8), ("flat576", 16), ("dsa656", 8)])
def test_mla_decode_fits(layout, num_heads, page_size, is_whole, tmp_path):
    tile = mla_tile(layout, num_heads)
    latent_row, rope_row, rope_start, scale_row = ROWS[layout]
    signature = {
        "latent_ptr": "*bf16" if layout == "bf16" else "*fp8e4nv",
        "rope_ptr": "*fp8e4nv" if layout == "flat576" else "*bf16",
        "tile_scale_ptr": "*fp32",
        "num_heads": "i32",
    }
    constants = {"TILE": 128, "ROPE": 64, "LATENT_ROW": latent_row, "ROPE_ROW": rope_row, "ROPE_START": rope_start}
    constants |= {"SCALE_ROW": scale_row, "SCALE_START": 128}
    compiled = compile_tile("mla", signature, constants, page_size, is_whole, tile, tmp_path)
    check(compiled, tile, BYTES[layout])
    if layout != "bf16" and tile.block_heads >= LEAST_TOKENS:
        assert "e4m3.e4m3" in compiled.ptx


@pytest.mark.parametrize(("page_size", "is_whole"), [(64, True), (1, False)])
@pytest.mark.parametrize(("dtype", "group"), [("bf16", 12), ("fp8e4nv", 8)])
def test_gqa_decode_fits(dtype, group, page_size, is_whole, tmp_path):
    tile = gqa_tile(group)
    signature = {"key_ptr": f"*{dtype}", "value_ptr": f"*{dtype}", "num_kv_heads": "i32"}
    constants = {"GROUP": group, "WIDTH": 128}
    compiled = compile_tile("gqa", signature, constants, page_size, is_whole, tile, tmp_path)
    check(compiled, tile, 512 if dtype == "bf16" else 256)


def test_the_merge_fits(tmp_path):
    signature = {"part_ptr": "*fp32", "part_lse_ptr": "*fp32", "out_ptr": "*bf16", "lse_ptr": "*fp32"}
    signature["num_splits"] = "i32"
    constants = {"WIDTH": 512, "BLOCK_S": split_kv.MERGE_SPLITS, "BLOCK_C": split_kv.MERGE_COLUMNS}
    compiled = compile_kernel("quantkit_kernels.attention_jit:merge_splits_kernel", signature, constants, tmp_path)
    assert compiled.stack_bytes == 0
