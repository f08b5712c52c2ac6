"""MLA rows: what is stored and read are the bytes of the twin in plain torch, and the twin's are written out here."""

import struct

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from quantkit_kernels import fp8_kv, reference
from quantkit_kernels.bits_jit import e4m3_codes
from quantkit_kernels.fp8_kv_jit import index_offsets, row_offsets
from quantkit_kernels.kv_layout import row_bytes
from quantkit_kernels.launch import IS_INTERPRETED
from quantkit_kernels.reference import kv_cache
from tests.kernels.compare import poisoned
from tests.kernels.kv_rows import both, rows, same, some_slots

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("quiet_numpy")]
ROWS = {"flat576": 576, "dsa656": 656, "bf16": 1152}
CASES = [("flat576", "sglang"), ("dsa656", "sglang"), ("dsa656", "vllm"), ("bf16", "sglang")]


def beside(layout):
    """The scale of rows that hold none."""
    return {"scale": 0.3} if layout == "flat576" else {}


@triton.jit
def encode_kernel(values_ptr, codes_ptr, num_values, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes_ptr + at, e4m3_codes(tl.load(values_ptr + at, mask=at < num_values)), mask=at < num_values)


def encoded(values):
    codes = poisoned(tuple(values.shape), torch.uint8, str(values.device))
    encode_kernel[(triton.cdiv(values.numel(), 4096),)](values, codes, values.numel(), BLOCK=4096)
    return codes


def test_every_bf16_value_gets_the_code_of_torch(device):
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float().to(device)
    wanted = bits.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    wanted[bits.isnan()] = 0x7F
    assert torch.equal(encoded(bits), wanted)


def test_every_midpoint_of_two_codes_goes_to_the_even_one(device):
    """And its neighbours in float32 to the nearer one."""
    codes = torch.arange(0x7F)
    middle = codes.to(torch.uint8).view(torch.float8_e4m3fn).double().unfold(0, 2, 1).mean(1).float()
    infinity = torch.full_like(middle, float("inf"))
    assert torch.equal(encoded(middle.to(device)).cpu(), (codes[:-1] + codes[:-1] % 2).to(torch.uint8))
    assert torch.equal(encoded(middle.nextafter(-infinity).to(device)).cpu(), codes[:-1].to(torch.uint8))
    assert torch.equal(encoded(middle.nextafter(infinity).to(device)).cpu(), codes[1:].to(torch.uint8))
    assert torch.equal(encoded(-middle.to(device)).cpu(), (codes[:-1] + codes[:-1] % 2 + 0x80).to(torch.uint8))


def test_codes_as_literals(device):
    values = [
        0.0,
        -0.0,
        2.0**-9,
        2.0**-10,
        3 * 2.0**-10,
        2.0**-6,
        1.0,
        1.0625,
        1.1875,
        -448.0,
        464.0,
        1e9,
        float("nan"),
    ]
    wanted = [0x00, 0x80, 0x01, 0x00, 0x02, 0x08, 0x38, 0x38, 0x3A, 0xFE, 0x7E, 0x7E, 0x7F]
    values += [-float("nan"), float("inf"), -float("inf"), -1e-45]
    wanted += [0x7F, 0x7E, 0xFE, 0x80]
    assert encoded(torch.tensor(values, device=device)).tolist() == wanted
    assert kv_cache.encode_e4m3(torch.tensor(values, device=device)).tolist() == wanted


@pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU's cast is right")
def test_the_cast_of_the_interpreter_is_wrong_and_ours_is_not():
    @triton.jit
    def cast_kernel(values_ptr, codes_ptr, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(codes_ptr + at, tl.load(values_ptr + at).to(tl.float8e4nv).to(tl.uint8, bitcast=True))

    values = torch.linspace(-448, 448, 4096)
    wanted = values.to(torch.float8_e4m3fn).view(torch.uint8)
    cast = torch.zeros(4096, dtype=torch.uint8)
    cast_kernel[(1,)](values, cast, BLOCK=4096)
    assert int((cast != wanted).sum()) > 10
    assert torch.equal(encoded(values), wanted)


@pytest.mark.parametrize("num_tokens", [1, 5, 37])
@pytest.mark.parametrize(("layout", "scale_rule"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mla_rows_are_those_of_the_twin(dtype, layout, scale_rule, num_tokens, device):
    latent, rope = rows(num_tokens, 512, dtype, device), rows(num_tokens, 64, dtype, device, seed=1)
    slots = some_slots(num_tokens, 48, device)
    got, wanted = both((3, 16, ROWS[layout]), device)
    options = {"layout": layout, "scale_rule": scale_rule} | beside(layout)
    fp8_kv.quantize_kv_mla(latent, rope, slots, got, **options)
    reference.quantize_kv_mla(latent, rope, slots, wanted, **options)
    assert torch.equal(got, wanted)
    untouched = torch.ones(48, dtype=torch.bool, device=device)
    untouched[slots[(slots >= 0) & (slots < 48)]] = False
    assert bool((got.view(48, -1)[untouched] == 0xA5).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("layout", "scale_rule"), CASES)
def test_mla_rows_are_read_as_the_twin_reads_them(layout, scale_rule, dtype, device):
    cache = poisoned((2, 16, ROWS[layout]), torch.uint8, device)
    latent, rope = rows(29, 512, torch.bfloat16, device), rows(29, 64, torch.bfloat16, device, seed=1)
    slots = some_slots(29, 32, device, torch.int32)
    reference.quantize_kv_mla(latent, rope, slots, cache, layout=layout, scale_rule=scale_rule, **beside(layout))
    got = fp8_kv.dequantize_kv_mla(cache, slots, layout=layout, dtype=dtype, **beside(layout))
    wanted = reference.dequantize_kv_mla(cache, slots, layout=layout, dtype=dtype, **beside(layout))
    for part, expected in zip(got, wanted, strict=True):
        assert same(part, expected)
        assert bool((part[-2:] == 0).all())


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.3, 1e-3])
def test_a_scale_divides_when_stored_and_multiplies_when_read(scale, device):
    latent, rope = rows(9, 512, torch.bfloat16, device), rows(9, 64, torch.bfloat16, device, seed=1)
    slots = some_slots(9, 12, device)
    got, wanted = both((12, 576), device)
    fp8_kv.quantize_kv_mla(latent, rope, slots, got, layout="flat576", scale=scale)
    reference.quantize_kv_mla(latent, rope, slots, wanted, layout="flat576", scale=scale)
    assert torch.equal(got, wanted)
    for part, expected in zip(
        fp8_kv.dequantize_kv_mla(got, slots, layout="flat576", scale=scale),
        reference.dequantize_kv_mla(got, slots, layout="flat576", scale=scale),
        strict=True,
    ):
        assert same(part, expected)


def test_a_dsa_row_by_hand(device):
    """Tiles of 448 x 2, one of ones, one of 448 x 3 with its half, one of zeros; rope is 1.5."""
    latent = torch.zeros((1, 512), dtype=torch.bfloat16, device=device)
    latent[0, 0], latent[0, 1] = 896.0, -2.0
    latent[0, 128:256] = 1.0
    latent[0, 256], latent[0, 257] = -1344.0, 672.0
    rope = torch.full((1, 64), 1.5, dtype=torch.bfloat16, device=device)
    slots = torch.tensor([1], device=device)
    codes = {
        "sglang": bytes([0x7E, 0xB8]) + bytes(126) + bytes([0x7E]) * 128 + bytes([0xFE, 0x76]) + bytes(254),
        # 336 is between 320 and 352, and 168 between 160 and 176: both go to the even code
        "vllm": bytes([0x7E, 0xB8]) + bytes(126) + bytes([0x78]) * 128 + bytes([0xFA, 0x72]) + bytes(254),
    }
    scales = {
        "sglang": struct.pack("<4f", 2.0, np.float32(1) / np.float32(448), 3.0, 0.0),
        "vllm": struct.pack("<4f", 2.0, 2.0**-8, 4.0, 2.0**-13),
    }
    for rule in ("sglang", "vllm"):
        for module in (fp8_kv, reference):
            cache = poisoned((2, 656), torch.uint8, device)
            module.quantize_kv_mla(latent, rope, slots, cache, layout="dsa656", scale_rule=rule)
            wanted = codes[rule] + scales[rule] + bytes([0xC0, 0x3F]) * 64
            assert cache[0].tolist() == [0xA5] * 656
            assert bytes(cache[1].tolist()) == wanted, (rule, module)


def test_a_flat_and_a_bf16_row_by_hand(device):
    latent = torch.tensor([[1.0, -3.0] * 64], dtype=torch.bfloat16, device=device)
    rope = torch.tensor([[0.5] * 16], dtype=torch.bfloat16, device=device)
    slots = torch.tensor([0], device=device)
    for module in (fp8_kv, reference):
        flat, wide = poisoned((1, 144), torch.uint8, device), poisoned((1, 288), torch.uint8, device)
        module.quantize_kv_mla(latent, rope, slots, flat, layout="flat576", scale=0.5)
        module.quantize_kv_mla(latent, rope, slots, wide, layout="bf16")
        assert bytes(flat[0].tolist()) == bytes([0x40, 0xCC]) * 64 + bytes([0x38]) * 16  # 2, -6, 1
        assert bytes(wide[0].tolist()) == bytes([0x80, 0x3F, 0x40, 0xC0]) * 64 + bytes([0x00, 0x3F]) * 16


def test_vllms_power_of_two_is_that_of_its_own_formula():
    """Its writer takes float32 products and logarithms: for every 16-bit magnitude, ours by bits is the same."""
    bits = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16)
    for dtype, last in ((torch.bfloat16, 0x7F80), (torch.float16, 0x7C00)):
        amax = bits[:last].view(dtype).float()
        values = torch.zeros((len(amax), 128))
        values[:, 7] = amax
        row = torch.maximum(amax * torch.tensor(1 / 448), torch.tensor(1e-4)).log2().ceil().exp2()
        index = (torch.maximum(amax, torch.tensor(1e-4)) / torch.tensor(448.0)).log2().ceil().exp2()
        assert torch.equal(kv_cache.tile_codes(values, row="row", scale_rule="vllm")[1][:, 0], row)
        assert torch.equal(kv_cache.tile_codes(values, row="index", scale_rule="vllm")[1][:, 0], index)


def test_all_codes_survive_reading_and_storing(device):
    """0xFF is another NaN, and comes back as 0x7F."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    cache = torch.cat([codes, codes, codes[:64]])[None].clone()
    slots = torch.tensor([0], device=device)
    latent, rope = fp8_kv.dequantize_kv_mla(cache, slots, layout="flat576")
    assert same(latent[0, :256], kv_cache._narrow(codes.view(torch.float8_e4m3fn).float(), torch.bfloat16))
    got = poisoned((1, 576), torch.uint8, device)
    fp8_kv.quantize_kv_mla(latent, rope, slots, got, layout="flat576")
    assert torch.equal(got, torch.where(cache == 0xFF, 0x7F, cache))
    # a tile whose largest code is 448 keeps its scale and its codes
    finite = codes[(codes & 0x7F) != 0x7F].repeat(3)[:512]
    tiles = torch.cat([finite, torch.full((4,), 2.0, device=device).view(torch.uint8), codes[:128]])[None].clone()
    tiles[0, [0, 128, 256, 384]] = 0x7E
    for rule in ("sglang", "vllm"):
        got = poisoned((1, 656), torch.uint8, device)
        parts = fp8_kv.dequantize_kv_mla(tiles, slots, layout="dsa656")
        fp8_kv.quantize_kv_mla(*parts, slots, got, layout="dsa656", scale_rule=rule)
        assert torch.equal(got, tiles)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages_do_not_change_rows(page_size, device):
    latent, rope = rows(11, 512, torch.bfloat16, device), rows(11, 64, torch.bfloat16, device, seed=1)
    slots = some_slots(11, 64, device)
    got, wanted = both((64, 656), device)
    fp8_kv.quantize_kv_mla(latent, rope, slots, got.view(-1, page_size, 656), layout="dsa656")
    reference.quantize_kv_mla(latent, rope, slots, wanted, layout="dsa656")
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(("latent_dim", "rope_dim"), [(128, 16), (384, 80)])
def test_other_widths(latent_dim, rope_dim, device):
    both_parts = rows(6, latent_dim + rope_dim, torch.bfloat16, device)  # slices of one tensor
    latent, rope = both_parts[:, :latent_dim], both_parts[:, latent_dim:]
    slots = some_slots(6, 9, device)
    for layout, rule in CASES:
        got, wanted = both((9, 1, row_bytes(layout, latent_dim, rope_dim)), device)
        fp8_kv.quantize_kv_mla(latent, rope, slots, got, layout=layout, scale_rule=rule)
        reference.quantize_kv_mla(latent, rope, slots, wanted, layout=layout, scale_rule=rule)
        assert torch.equal(got, wanted)
        sizes = {"latent_dim": latent_dim, "rope_dim": rope_dim}
        for part, expected in zip(
            fp8_kv.dequantize_kv_mla(got, slots, layout=layout, **sizes),
            reference.dequantize_kv_mla(got, slots, layout=layout, **sizes),
            strict=True,
        ):
            assert same(part, expected)


def test_row_sizes_are_those_of_the_engines():
    assert {layout: row_bytes(layout) for layout in ROWS} == ROWS


@triton.jit
def offsets_kernel(slots_ptr, rows_ptr, keys_ptr, scales_ptr, ROW: tl.constexpr, PAGE: tl.constexpr):
    at = tl.arange(0, 4)
    slots = tl.load(slots_ptr + at)
    tl.store(rows_ptr + at, row_offsets(slots, ROW))
    key, scale = index_offsets(slots, PAGE)
    tl.store(keys_ptr + at, key)
    tl.store(scales_ptr + at, scale)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_go_beyond_31_bits(dtype, device):
    numbers = [5, 4_000_000, 123_456_789, 2**31 - 1]
    out = torch.zeros((3, 4), dtype=torch.int64, device=device)
    offsets_kernel[(1,)](torch.tensor(numbers, dtype=dtype, device=device), *out, ROW=656, PAGE=64)
    assert out[0].tolist() == [656 * slot for slot in numbers]
    assert out[1].tolist() == [slot // 64 * 64 * 132 + slot % 64 * 128 for slot in numbers]
    assert out[2].tolist() == [(slot // 64 * 64 * 132 + 64 * 128 + slot % 64 * 4) // 4 for slot in numbers]


def test_two_runs_are_the_same_and_fill_poisoned_outputs(device, monkeypatch):
    latent, rope = rows(33, 512, torch.bfloat16, device), rows(33, 64, torch.bfloat16, device, seed=1)
    slots = some_slots(33, 64, device)
    monkeypatch.setattr(fp8_kv, "empty_output", lambda shape, dtype, cache: poisoned(shape, dtype, device))
    for layout, rule in CASES:
        caches = both((64, ROWS[layout]), device)
        for cache in caches:
            fp8_kv.quantize_kv_mla(latent, rope, slots, cache, layout=layout, scale_rule=rule)
        assert torch.equal(*caches)
        first, second = (fp8_kv.dequantize_kv_mla(cache, slots, layout=layout) for cache in caches)
        assert same(first[0], second[0])
        assert same(first[0], reference.dequantize_kv_mla(caches[0], slots, layout=layout)[0])
        assert bool(torch.isfinite(first[1][4:]).all())


def test_nothing_is_written_around_the_cache(device):
    """By the first and the last row of a cache between guards, nor by slots that would lie in these."""
    slots = torch.tensor([0, -1, 1, 2, -2], device=device)
    for layout, row in ROWS.items():
        whole = poisoned((6, row), torch.uint8, device)
        latent, rope = rows(5, 512, torch.bfloat16, device), rows(5, 64, torch.bfloat16, device, seed=1)
        fp8_kv.quantize_kv_mla(latent, rope, slots, whole[2:4], layout=layout)
        assert bool((whole[:2] == 0xA5).all())
        assert bool((whole[4:] == 0xA5).all())
        for part in fp8_kv.dequantize_kv_mla(whole[2:4], slots, layout=layout):
            assert bool((part[[1, 3, 4]] == 0).all())


def test_no_rows_are_no_work(device):
    slots = torch.zeros(0, dtype=torch.int32, device=device)
    empty = torch.zeros((0, 512), dtype=torch.bfloat16, device=device)
    for layout, row in ROWS.items():
        cache = poisoned((4, row), torch.uint8, device)
        fp8_kv.quantize_kv_mla(empty, empty[:, :64], slots, cache, layout=layout)
        assert bool((cache == 0xA5).all())
        latent, rope = fp8_kv.dequantize_kv_mla(cache, slots, layout=layout)
        assert (latent.shape, rope.shape) == ((0, 512), (0, 64))
