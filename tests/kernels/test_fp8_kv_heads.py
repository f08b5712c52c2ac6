"""Keys and values with one scale each, the indexer's keys, and what every operation refuses."""

import struct

import pytest
import torch

from quantkit_kernels import fp8_kv, reference
from tests.kernels.compare import poisoned
from tests.kernels.kv_rows import both, rows, same, some_slots

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("quiet_numpy")]
BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), [(1, 128, 128), (3, 40, 24), (5, 64, 192)])
def test_keys_and_values_are_those_of_the_twin(heads, key_dim, value_dim, dtype, device):
    key = rows(11, heads * key_dim, dtype, device).view(11, heads, key_dim)
    value = rows(11, heads * value_dim, dtype, device, seed=1).view(11, heads, value_dim)
    slots = some_slots(11, 32, device, torch.int32)
    got_key, wanted_key = both((2, 16, heads, key_dim), device)
    got_value, wanted_value = both((32, heads, value_dim), device)
    scales = {"key_scale": 0.25, "value_scale": 0.3}
    fp8_kv.quantize_kv(key, value, slots, got_key, got_value, **scales)
    reference.quantize_kv(key, value, slots, wanted_key, wanted_value, **scales)
    assert torch.equal(got_key, wanted_key)
    assert torch.equal(got_value, wanted_value)
    for out in (torch.bfloat16, torch.float32):
        got = fp8_kv.dequantize_kv(got_key, got_value, slots, dtype=out, **scales)
        wanted = reference.dequantize_kv(wanted_key, wanted_value, slots, dtype=out, **scales)
        assert same(got[0], wanted[0])
        assert same(got[1], wanted[1])


def test_a_key_and_a_value_by_hand(device):
    """Slices of one projection, as a model has them."""
    both_parts = torch.tensor([[1.0, -2.0, 3.0, 600.0]] * 2, dtype=BF16, device=device)
    key, value = both_parts[:, None, :2], both_parts[:, None, 2:]
    slots = torch.tensor([2, -1], device=device)
    for module in (fp8_kv, reference):
        key_cache, value_cache = both((3, 1, 2), device)
        module.quantize_kv(key, value, slots, key_cache, value_cache, key_scale=2.0, value_scale=1.5)
        assert key_cache.flatten().tolist() == [0xA5] * 4 + [0x30, 0xB8]
        assert value_cache.flatten().tolist() == [0xA5] * 4 + [0x40, 0x7C]  # 400 is between 384 and 416, to even


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("scale_rule", ["sglang", "vllm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_index_keys_are_those_of_the_twin(dtype, scale_rule, page_size, device):
    keys = rows(19, 128, dtype, device)
    slots = some_slots(19, 64, device)
    got, wanted = both((64 // page_size, page_size, 132), device)
    fp8_kv.quantize_index_keys(keys, slots, got, scale_rule=scale_rule)
    reference.quantize_index_keys(keys, slots, wanted, scale_rule=scale_rule)
    assert torch.equal(got, wanted)
    for out in (torch.bfloat16, torch.float16, torch.float32):
        found = fp8_kv.dequantize_index_keys(got, slots, dtype=out)
        assert same(found, reference.dequantize_index_keys(wanted, slots, dtype=out))


def test_a_page_holds_its_keys_and_then_its_scales(device):
    """Of a page of two slots, both in use: 448 and 2**-14 at most, whose scale is that of 1e-4."""
    keys = torch.zeros((2, 128), dtype=BF16, device=device)
    keys[0, 0], keys[1, 1] = 448.0, 2.0**-14
    slots = torch.tensor([3, 2], device=device)
    floor = torch.tensor(1e-4) / torch.tensor(448.0)
    small = {"sglang": (0x79, float(floor)), "vllm": (0x78, 2.0**-22)}  # 273.4 is nearer to 288; 256
    for rule in ("sglang", "vllm"):
        for module in (fp8_kv, reference):
            cache = poisoned((2, 2, 132), torch.uint8, device)
            module.quantize_index_keys(keys, slots, cache, scale_rule=rule)
            code, scale = small[rule]
            page = bytes([0, code]) + bytes(126) + bytes([0x7E]) + bytes(127) + struct.pack("<2f", scale, 1.0)
            assert cache[0].flatten().tolist() == [0xA5] * 264
            assert bytes(cache[1].flatten().tolist()) == page, (rule, module)


def test_no_rows_are_no_work(device):
    slots = torch.zeros(0, dtype=torch.int64, device=device)
    keys, heads = torch.zeros((0, 128), dtype=BF16, device=device), torch.zeros((0, 2, 64), dtype=BF16, device=device)
    pages, cache = poisoned((1, 64, 132), torch.uint8, device), poisoned((4, 2, 64), torch.uint8, device)
    fp8_kv.quantize_index_keys(keys, slots, pages)
    fp8_kv.quantize_kv(heads, heads, slots, cache, cache)
    assert bool((pages == 0xA5).all() & (cache == 0xA5).all())
    assert fp8_kv.dequantize_index_keys(pages, slots).shape == (0, 128)
    assert fp8_kv.dequantize_kv(cache, cache, slots)[1].shape == (0, 2, 64)


MLA = {
    "latent": torch.zeros((3, 512), dtype=BF16),
    "rope": torch.zeros((3, 64), dtype=BF16),
    "slots": torch.zeros(3, dtype=torch.int32),
    "cache": torch.zeros((4, 656), dtype=torch.uint8),
    "layout": "dsa656",
}
FLAT = {"layout": "flat576", "cache": torch.zeros((4, 576), dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": "dsa657"}, "not one of bf16, flat576, dsa656"),
        ({"layout": "flat576"}, "\\[..., 576\\] bytes"),
        ({"scale_rule": "trt"}, "not one of sglang, vllm"),
        ({"scale": 0.5}, "dsa656 rows have no scale beside them, and scale is 0.5"),
        (FLAT | {"scale": 0.0}, "scale is 0.0, not between"),
        (FLAT | {"scale": float("nan")}, "scale is nan"),
        (FLAT | {"scale": float("inf")}, "scale is inf"),
        ({"latent": torch.zeros((3, 512))}, "latent is BF16 or FP16, not torch.float32"),
        ({"latent": torch.zeros((3, 500), dtype=BF16)}, "500 columns, no multiple of 128"),
        ({"rope": torch.zeros((3, 24), dtype=BF16)}, "24 columns, no multiple of 16"),
        ({"rope": torch.zeros((2, 64), dtype=BF16)}, "rope has 2 rows on cpu, slots 3"),
        ({"rope": torch.zeros((3, 1, 64), dtype=BF16)}, "rope must have 2 dimensions"),
        ({"latent": torch.zeros((512, 3), dtype=BF16).T}, "rows of latent must be contiguous"),
        ({"slots": torch.zeros(3)}, "int32 or int64 vector, not torch.float32"),
        ({"slots": torch.zeros(6, dtype=torch.int64)[::2]}, "contiguous int32"),
        ({"cache": torch.zeros((4, 656), dtype=torch.int8)}, "cache is uint8, not torch.int8"),
        ({"cache": torch.zeros((8, 656), dtype=torch.uint8)[::2]}, "cache must be contiguous"),
        ({"cache": torch.zeros(657, dtype=torch.uint8)[1:].view(1, 656)}, "multiple of 4 bytes"),
        ({"cache": torch.zeros(656, dtype=torch.uint8)}, "\\[..., 656\\] bytes"),
    ],
)
def test_what_does_not_go_together_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        fp8_kv.quantize_kv_mla(**(MLA | change))


def test_the_other_operations_name_it_too():
    slots, heads = MLA["slots"], torch.zeros((3, 2, 64), dtype=BF16)
    cache, pages = torch.zeros((4, 2, 64), dtype=torch.uint8), torch.zeros((2, 64, 132), dtype=torch.uint8)
    with pytest.raises(ValueError, match="key_cache ends in \\(2, 64\\), key in \\(2, 32\\)"):
        fp8_kv.quantize_kv(heads[..., :32].contiguous(), heads, slots, cache, cache)
    with pytest.raises(ValueError, match="rows of key must be contiguous"):
        fp8_kv.quantize_kv(heads[..., :32], heads, slots, cache, cache)
    with pytest.raises(ValueError, match="key_cache has 4 slots, value_cache 3"):
        fp8_kv.quantize_kv(heads, heads, slots, cache, cache[:3])
    with pytest.raises(ValueError, match=r"value_scale is -1\.0"):
        fp8_kv.quantize_kv(heads, heads, slots, cache, cache, value_scale=-1.0)
    with pytest.raises(ValueError, match="key_cache has 4 slots, value_cache 3"):
        fp8_kv.dequantize_kv(cache, cache[:3], slots)
    with pytest.raises(ValueError, match="value_scale is a number, not a Tensor"):
        fp8_kv.quantize_kv(heads, heads, slots, cache, cache, value_scale=torch.ones(()))
    with pytest.raises(ValueError, match=r"key_cache has no columns: \(4, 0, 64\)"):
        fp8_kv.dequantize_kv(cache[:, :0], cache[:, :0], slots)
    with pytest.raises(ValueError, match="heads, columns"):
        fp8_kv.dequantize_kv(cache[0], cache[0], slots)
    with pytest.raises(ValueError, match=r"not torch\.int32"):
        fp8_kv.dequantize_kv_mla(MLA["cache"], slots, layout="dsa656", dtype=torch.int32)
    with pytest.raises(ValueError, match="bf16 rows have no scale beside them"):
        fp8_kv.dequantize_kv_mla(torch.zeros((4, 1152), dtype=torch.uint8), slots, layout="bf16", scale=2.0)
    with pytest.raises(ValueError, match="128 columns, not 64"):
        fp8_kv.quantize_index_keys(heads[:, 0], slots, pages)
    with pytest.raises(ValueError, match="page size, 132"):
        fp8_kv.quantize_index_keys(MLA["latent"][:, :128], slots, pages.view(2, -1))
    with pytest.raises(ValueError, match="page size, 132"):
        fp8_kv.dequantize_index_keys(pages.view(2, -1), slots)
