"""Conversion on the GPU gives the bytes of the specification in numpy: codes, scales and the error of each row."""

import inspect

import numpy as np
import pytest
import torch

from quantkit.numerics import absmax, bfloat16, fp8, grid, metrics, packing, search
from quantkit_kernels import requantize
from quantkit_kernels.requantize import Source, quantize, requantize_fp8_to_int4, row_errors

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def large_steps(device, monkeypatch):
    """The interpreter takes few large steps faster than many small ones; several programs are left."""
    if device == "cpu":
        monkeypatch.setattr(requantize, "WEIGHTS_PER_PROGRAM", 4096)


def fp8_weight(rng, shape, block):
    """Codes without NaN of every magnitude, some groups of zeros, scales of many sizes, and some that are zero."""
    codes_RC = rng.integers(0, 256, shape).astype(np.uint8)
    codes_RC[(codes_RC & 0x7F) == 0x7F] = 0x7E
    codes_RC[:, :32] &= 0x87  # subnormals and zeros
    codes_RC[0] &= 0x80
    codes_RC[-1, ::2] = codes_RC[-1, 1::2] ^ 0x80  # ties of both signs for the largest
    blocks = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
    return codes_RC, np.exp2(rng.uniform(-12, 4, blocks)).astype(np.float32)


def expected(values_RC, ints, *, group_size, scales, signed, importance_C=None):
    if scales == "absmax":
        return absmax.quantize_absmax(bfloat16.from_float32(values_RC), group_size=group_size)
    return search.quantize_search(*ints, group_size=group_size, signed=signed, importance_C=importance_C)


def check(source, values_RC, ints, device, *, group_size, importance_C=None, **mode):
    codes_RC, scale_RG = expected(values_RC, ints, group_size=group_size, importance_C=importance_C, **mode)
    levels = None if importance_C is None else torch.from_numpy(importance_C.astype(np.int32)).to(device)
    int4 = quantize(source, group_size=group_size, levels=levels, **mode)
    assert (int4.scale.view(torch.int16).cpu().numpy().view(np.uint16) == scale_RG).all()
    assert (int4.packed.cpu().numpy() == packing.pack_int4(codes_RC)).all()
    errors = row_errors(source, int4, group_size=group_size)
    for got, wanted in zip(errors, metrics.error_rows(values_RC, codes_RC, scale_RG, group_size), strict=True):
        assert got.cpu().numpy().tobytes() == wanted.tobytes()


MODE = {"group_size": 64, "scales": "search", "signed": True}
MODES = [("search", True), ("search", False), ("absmax", False)]
BLOCKS = {"published": (128, 128), "row": (1, 256), "tensor": (50, 256), "microscaling": (1, 32)}


@pytest.mark.parametrize(("scales", "signed"), MODES)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_fp8_gives_the_bytes_of_the_specification(block, group_size, scales, signed, device):
    rng = np.random.default_rng(1)
    codes_RC, scale_BB = fp8_weight(rng, (50, 256), block)
    values_RC = fp8.dequantize(codes_RC, scale_BB, block=block)
    ints = grid.fp8_grid(codes_RC, scale_BB, block=block, group_size=group_size)
    source = Source(torch.from_numpy(codes_RC).to(device), torch.from_numpy(scale_BB).to(device), block)
    check(source, values_RC, ints, device, group_size=group_size, scales=scales, signed=signed)


@pytest.mark.parametrize(("scales", "signed"), MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_floats_give_the_bytes_of_the_specification(dtype, scales, signed, device):
    rng = np.random.default_rng(2)
    values_RC = (rng.standard_normal((7, 320)) * np.exp2(rng.uniform(-120, 100, (7, 320)))).astype(np.float32)
    values_RC[:, 32:64] = 0.0
    values_RC[3, 64:96] = np.float32(2.0**-133)  # scales below the smallest normal number
    if dtype == torch.bfloat16:
        values_RC = bfloat16.to_float32(bfloat16.from_float32(values_RC))
    array = torch.from_numpy(values_RC).to(dtype).to(device)
    ints = grid.value_grid(values_RC, group_size=32)
    check(Source(array), values_RC, ints, device, group_size=32, scales=scales, signed=signed)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_absmax_takes_several_rows_and_several_tiles_of_a_row(dtype, device, monkeypatch):
    """The last of either are incomplete."""
    monkeypatch.setattr(requantize, "ENOUGH_PROGRAMS", 7)
    codes_RC, scale_BB = fp8_weight(np.random.default_rng(6), (10, 2048 + 96), (4, 32))
    values_RC = fp8.dequantize(codes_RC, scale_BB, block=(4, 32), row_offset=0)
    if dtype == torch.uint8:
        source = Source(torch.from_numpy(codes_RC).to(device), torch.from_numpy(scale_BB).to(device), (4, 32))
    else:
        values_RC = bfloat16.to_float32(bfloat16.from_float32(values_RC))
        source = Source(torch.from_numpy(values_RC).to(torch.bfloat16).to(device))
    check(source, values_RC, None, device, group_size=32, scales="absmax", signed=False)


def test_what_is_not_aligned_to_words_gives_the_same_bytes(device):
    codes_RC, scale_BB = fp8_weight(np.random.default_rng(7), (5, 64), (128, 128))
    raw = torch.zeros(5 * 64 + 3, dtype=torch.uint8, device=device)
    array = raw[3:].view(5, 64)
    array.copy_(torch.from_numpy(codes_RC))
    assert array.data_ptr() % 8
    values_RC = fp8.dequantize(codes_RC, scale_BB, block=(128, 128))
    source = Source(array, torch.from_numpy(scale_BB).to(device))
    check(source, values_RC, None, device, group_size=32, scales="absmax", signed=False)


def test_an_odd_offset_at_an_aligned_address_gives_the_same_bytes(device):
    """As a tensor may lie in memory that something else has allocated."""
    rng = np.random.default_rng(8)
    codes_RC, scale_BB = fp8_weight(rng, (4, 64), (128, 128))
    memory = torch.zeros(4 * 64 + 16, dtype=torch.uint8, device=device)
    array = torch.from_dlpack(memory[3:])[5 : 5 + 4 * 64].view(4, 64)
    assert (array.data_ptr() % 8, array.storage_offset() % 8) == (0, 5)
    array.copy_(torch.from_numpy(codes_RC))
    values_RC = fp8.dequantize(codes_RC, scale_BB, block=(128, 128))
    source = Source(array, torch.from_numpy(scale_BB).to(device))
    check(source, values_RC, None, device, group_size=32, scales="absmax", signed=False)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_absmax_rounds_to_bf16_once(dtype, device):
    """Values around the middle of two BF16; FP8 whose groups have several scales, of rows from within a block on."""
    rng = np.random.default_rng(11)
    if dtype == torch.uint8:
        codes_RC, scale_BB = fp8_weight(rng, (9, 256), (4, 32))
        values_RC = fp8.dequantize(codes_RC[3:], scale_BB, block=(4, 32), row_offset=3)
        source = Source(torch.from_numpy(codes_RC[3:]).to(device), torch.from_numpy(scale_BB).to(device), (4, 32), 3)
    else:
        middle = rng.integers(0x3000, 0x4800, (6, 256)).astype(np.uint32) << 16 | 0x8000
        values_RC = (middle + rng.integers(-1, 2, middle.shape).astype(np.uint32)).view(np.float32)
        source = Source(torch.from_numpy(values_RC).to(device))
    check(source, values_RC, None, device, group_size=128, scales="absmax", signed=False)


def test_a_later_row_finds_its_block(device):
    codes_RC, scale_BB = fp8_weight(np.random.default_rng(3), (300, 64), (128, 64))
    whole = quantize(
        Source(torch.from_numpy(codes_RC).to(device), torch.from_numpy(scale_BB).to(device), (128, 64)),
        group_size=32,
        scales="search",
        signed=True,
    )
    part = quantize(
        Source(torch.from_numpy(codes_RC[200:]).to(device), torch.from_numpy(scale_BB).to(device), (128, 64), 200),
        group_size=32,
        scales="search",
        signed=True,
    )
    assert torch.equal(whole.packed[200:], part.packed)
    assert torch.equal(whole.scale[200:].view(torch.int16), part.scale.view(torch.int16))


def test_nothing_is_written_beyond_the_output_and_all_of_it_is(device, monkeypatch):
    """Outputs are slices of poisoned memory."""
    empty, guards = torch.empty, []

    def poisoned(shape, *, dtype, device):
        count = int(np.prod(shape))
        whole = empty(count + 64, dtype=dtype, device=device)
        whole.view(torch.uint8).fill_(0xA5)
        guards.append((whole, count))
        return whole[32 : count + 32].view(shape)

    codes_RC, scale_BB = fp8_weight(np.random.default_rng(4), (3, 96), (128, 128))
    source = Source(torch.from_numpy(codes_RC).to(device), torch.from_numpy(scale_BB).to(device))
    wanted = quantize(source, group_size=32, scales="search", signed=True)
    monkeypatch.setattr(requantize.torch, "empty", poisoned)
    got = quantize(source, group_size=32, scales="search", signed=True)
    assert torch.equal(got.packed, wanted.packed)
    assert torch.equal(got.scale.view(torch.int16), wanted.scale.view(torch.int16))
    for whole, count in guards:
        for edge in (whole[:32], whole[count + 32 :]):
            assert bool((edge.view(torch.uint8) == 0xA5).all())


def test_every_code_is_decoded(device):
    """Each of the 254 codes stands alone in a group: its magnitude decides the scale."""
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    codes_RC = np.zeros((len(codes), 32), np.uint8)
    codes_RC[:, 5] = codes
    scale_BB = np.ones((2, 1), np.float32)
    source = Source(torch.from_numpy(codes_RC).to(device), torch.from_numpy(scale_BB).to(device))
    values_RC = fp8.dequantize(codes_RC, scale_BB, block=(128, 128))
    ints = grid.fp8_grid(codes_RC, scale_BB, block=(128, 128), group_size=32)
    for scales, signed in MODES:
        check(source, values_RC, ints, device, group_size=32, scales=scales, signed=signed)


def moments(rng, num_cols):
    """Of very different sizes, some of them zero, and a first group of which nothing is known."""
    found = np.exp(rng.uniform(-20, 5, num_cols)) * (rng.random(num_cols) > 0.1)
    found[:128] = 0.0
    return found


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_importance_gives_the_bytes_of_the_specification(group_size, signed, device):
    rng = np.random.default_rng(8)
    codes_RC, scale_BB = fp8_weight(rng, (9, 384), (128, 128))
    importance_C = search.importance_levels(moments(rng, 384), group_size=group_size)
    ints = grid.fp8_grid(codes_RC, scale_BB, block=(128, 128), group_size=group_size)
    source = Source(torch.from_numpy(codes_RC).to(device), torch.from_numpy(scale_BB).to(device))
    values_RC = fp8.dequantize(codes_RC, scale_BB, block=(128, 128))
    mode = {"group_size": group_size, "scales": "search", "signed": signed, "importance_C": importance_C}
    check(source, values_RC, ints, device, **mode)
    values_RC = bfloat16.to_float32(bfloat16.from_float32(values_RC))
    source = Source(torch.from_numpy(values_RC).to(torch.bfloat16).to(device))
    check(source, values_RC, grid.value_grid(values_RC, group_size=group_size), device, **mode)


def test_second_moments_become_the_same_levels(device):
    rng = np.random.default_rng(9)
    found = moments(rng, 1 << 14)
    found[::5] = np.floor(rng.random(len(found[::5])) * 131070) / 2  # halves, of a largest that makes them ties
    found[31::64] = 65535.0
    for group_size in (32, 64, 128):
        levels = requantize.importance_levels(torch.from_numpy(found).to(device), group_size=group_size)
        assert (levels.cpu().numpy() == search.importance_levels(found, group_size=group_size)).all()


def test_the_public_form_takes_second_moments(device):
    rng = np.random.default_rng(10)
    codes_RC, scale_BB = fp8_weight(rng, (4, 256), (128, 128))
    found = moments(rng, 256).astype(np.float32)
    arrays = (torch.from_numpy(codes_RC).to(device), torch.from_numpy(scale_BB).to(device))
    int4 = requantize_fp8_to_int4(*arrays, **MODE, importance=torch.from_numpy(found).to(device))
    ints = grid.fp8_grid(codes_RC, scale_BB, block=(128, 128), group_size=64)
    levels = search.importance_levels(found, group_size=64)
    wanted, _ = search.quantize_search(*ints, group_size=64, signed=True, importance_C=levels)
    assert (int4.packed.cpu().numpy() == packing.pack_int4(wanted)).all()
    assert not (int4.packed.cpu() == requantize_fp8_to_int4(*arrays, **MODE).packed.cpu()).all()


def test_no_rows_are_no_work(device):
    source = Source(torch.empty((0, 64), dtype=torch.bfloat16, device=device))
    int4 = quantize(source, group_size=32, scales="search", signed=True)
    assert (int4.packed.shape, int4.scale.shape) == ((0, 8), (0, 2))
    assert row_errors(source, int4, group_size=32).error2.shape == (0,)


def test_nothing_that_changes_bytes_has_a_default():
    from quantkit.numerics import fused_cpu

    for function in (
        requantize_fp8_to_int4,
        quantize,
        search.quantize_search,
        fused_cpu.quantize_fp8,
        fused_cpu.quantize_values,
    ):
        options = inspect.signature(function).parameters
        for name in ("group_size", "scales", "signed"):
            assert name not in options or options[name].default is inspect.Parameter.empty, (function, name)


def test_candidates_are_those_of_the_specification():
    assert requantize.CANDIDATES == search.CANDIDATES


def test_the_public_form_takes_the_tensors_of_a_checkpoint(device):
    codes_RC, scale_BB = fp8_weight(np.random.default_rng(5), (130, 256), (128, 128))
    codes = torch.from_numpy(codes_RC).view(torch.float8_e4m3fn).to(device)
    scale_inv = torch.from_numpy(scale_BB).to(torch.bfloat16).to(device)
    int4 = requantize_fp8_to_int4(codes, scale_inv, **MODE)
    ints = grid.fp8_grid(codes_RC, scale_inv.float().cpu().numpy(), block=(128, 128), group_size=64)
    codes_RC, scale_RG = search.quantize_search(*ints, group_size=64, signed=True)
    assert (int4.packed.cpu().numpy() == packing.pack_int4(codes_RC)).all()
    assert int4.scale.dtype == torch.bfloat16
    assert (int4.scale.view(torch.int16).cpu().numpy().view(np.uint16) == scale_RG).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group_size": 48}, "not one of 32, 64, 128"),
        ({"group_size": 128}, "no multiple of the group size"),
        ({"codes": torch.zeros(64, dtype=torch.uint8)}, "contiguous matrix"),
        ({"codes": torch.zeros((4, 128), dtype=torch.uint8)[:, ::2]}, "contiguous matrix"),
        ({"codes": torch.zeros((4, 64), dtype=torch.int8)}, "not torch.int8"),
        ({"scale_inv": torch.ones((1, 2))}, "has a scale \\(1, 1\\)"),
        ({"scale_inv": torch.ones(1)}, "float32 matrix"),
        ({"importance": torch.ones(32)}, "importance \\(32,\\) does not go with"),
        ({"importance": torch.ones(64), "scales": "absmax"}, "importance is for the search: absmax has no use"),
        ({"importance": torch.ones(64, dtype=torch.int32)}, "second moments as floats, not torch.int32"),
        ({"scales": "serach"}, "scales is 'serach', not one of search, absmax"),
        ({"scales": "serach", "importance": torch.ones(64)}, "scales is 'serach'"),
        ({"block": (0, 0)}, r"block is \(0, 0\), not rows and columns from 1 on"),
        ({"block": (-1, 128)}, r"block is \(-1, 128\)"),
        ({"block": (128,)}, r"block is \(128,\)"),
        ({"scale_inv": torch.ones((1, 1), device="meta")}, "scale_inv is on meta, codes on cpu"),
    ],
)
def test_what_does_not_go_together_is_named(change, words, device):
    arguments = {"codes": torch.zeros((4, 64), dtype=torch.uint8), "scale_inv": torch.ones((1, 1)), "group_size": 32}
    arguments |= {"scales": "search", "signed": True}
    with pytest.raises(ValueError, match=words):
        requantize_fp8_to_int4(**(arguments | change))
