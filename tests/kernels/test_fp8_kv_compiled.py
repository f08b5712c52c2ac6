"""The KV kernels as the assembler makes them for sm_90: one kernel for each operation, and nothing spilled."""

import pytest

from quantkit_kernels import fp8_kv
from quantkit_kernels.fp8_kv_jit import BF16, DSA, FLAT
from tests.kernels.sm90 import compile_kernel

STORES, READS = "quantkit_kernels.fp8_kv_jit:", "quantkit_kernels.fp8_kv_read_jit:"
COUNTS = {"num_tokens": "i32", "num_slots": "i32"}
TOKENS = {"BLOCK_T": fp8_kv.BLOCK_T}
WIDTHS = {"LATENT": 512, "ROPE": 64, "BLOCK_R": 64}
ROWS = {FLAT.value: 576, DSA.value: 656, BF16.value: 1152}


def cache(layout):
    """The types that fp8_kv.py passes."""
    if layout == FLAT.value:
        return {"cache_ptr": "*u8", "cache16_ptr": "*u8", "cache32_ptr": "*u8"}
    return {"cache_ptr": "*u8", "cache16_ptr": "*bf16", "cache32_ptr": "*fp32"}


def check(compiled, *, most_registers):
    assert compiled.ptx.count(".visible .entry") == 1
    assert compiled.stack_bytes == 0
    assert compiled.num_fused == 0
    assert compiled.num_registers <= most_registers
    # a subnormal code is read as a subnormal float32
    assert "mul.ftz" not in compiled.ptx
    assert not [text for _, text in compiled.sass if text.split()[0].startswith("FMUL.FTZ")]


@pytest.mark.parametrize(
    ("source", "layout", "scale_floor", "is_power"),
    [
        ("*bf16", FLAT, 0.0, True),
        ("*fp16", FLAT, 0.0, False),
        ("*bf16", DSA, 0.0, False),
        ("*bf16", DSA, 1e-4, True),
        ("*fp16", BF16, 0.0, True),
    ],
)
def test_mla_rows_are_stored_by_one_kernel(source, layout, scale_floor, is_power, tmp_path):
    signature = {"latent_ptr": source, "rope_ptr": source, "slots_ptr": "*i64"} | cache(layout.value) | COUNTS
    signature |= {"latent_stride": "i32", "rope_stride": "i32", "scale": "fp32"}
    constants = {"IS_POWER": is_power, "SCALE_FLOOR": scale_floor, "LAYOUT": layout.value}
    constants |= WIDTHS | TOKENS | {"ROW": ROWS[layout.value]}
    check(
        compile_kernel(STORES + "store_mla_kernel", signature, constants, tmp_path, **fp8_kv.OPTIONS),
        most_registers=32,
    )


@pytest.mark.parametrize(("out", "layout"), [("*bf16", FLAT), ("*bf16", DSA), ("*fp32", DSA), ("*fp16", BF16)])
def test_mla_rows_are_read_by_one_kernel(out, layout, tmp_path):
    signature = cache(layout.value) | {"slots_ptr": "*i64", "latent_ptr": out, "rope_ptr": out} | COUNTS
    constants = {"LAYOUT": layout.value, "ROW": ROWS[layout.value]} | WIDTHS | TOKENS
    kernel = READS + "read_mla_kernel"
    check(
        compile_kernel(kernel, signature | {"scale": "fp32"}, constants, tmp_path, **fp8_kv.OPTIONS), most_registers=32
    )


def test_keys_and_values_are_stored_and_read_by_one_kernel(tmp_path):
    scales = {"key_scale": "fp32", "value_scale": "fp32"}
    parts, caches = {"key_ptr": "*bf16", "value_ptr": "*bf16"}, {"key_cache_ptr": "*u8", "value_cache_ptr": "*u8"}
    signature = parts | {"slots_ptr": "*i32"} | caches | COUNTS | {"key_stride": "i32", "value_stride": "i32"} | scales
    constants = {"IS_KEY_POWER": True, "IS_VALUE_POWER": False, "KEY": 1024, "VALUE": 1024} | TOKENS
    check(
        compile_kernel(STORES + "store_kv_kernel", signature, constants, tmp_path, **fp8_kv.OPTIONS), most_registers=32
    )
    signature = caches | {"slots_ptr": "*i32"} | parts | COUNTS | scales
    constants = {"KEY": 1024, "VALUE": 1024} | TOKENS
    check(compile_kernel(READS + "read_kv_kernel", signature, constants, tmp_path, **fp8_kv.OPTIONS), most_registers=32)


def test_index_keys_are_stored_and_read_by_one_kernel(tmp_path):
    caches, slots = {"cache_ptr": "*u8", "cache32_ptr": "*fp32"}, {"slots_ptr": "*i64"}
    signature = {"keys_ptr": "*bf16"} | slots | caches | COUNTS | {"stride": "i32"}
    constants = {"AMAX_FLOOR": 1e-4, "IS_POWER": True, "PAGE": 64} | TOKENS
    kernel = STORES + "store_index_kernel"
    check(compile_kernel(kernel, signature, constants, tmp_path, **fp8_kv.OPTIONS), most_registers=32)
    signature = caches | slots | {"keys_ptr": "*bf16"} | COUNTS
    constants = {"PAGE": 64} | TOKENS
    check(
        compile_kernel(READS + "read_index_kernel", signature, constants, tmp_path, **fp8_kv.OPTIONS), most_registers=32
    )
