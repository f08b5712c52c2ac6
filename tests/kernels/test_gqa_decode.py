"""GQA decode gives what float64 gives from the same caches; the bounds are those of test_mla_decode.py."""

import math

import pytest
import torch

from quantkit_kernels import attention_jit, tiles
from quantkit_kernels import gqa as module
from quantkit_kernels.fp8_kv import dequantize_kv, quantize_kv
from quantkit_kernels.gqa import gqa_decode
from quantkit_kernels.launch import IS_INTERPRETED
from quantkit_kernels.reference import attention as reference
from quantkit_kernels.reference import kv_cache
from tests.kernels.compare import assert_close
from tests.kernels.paged import paginate, queries

pytestmark = pytest.mark.gpu

BOUND = 2.0**-8
LSE_BOUND = 2.0**-10
SCALES = {"key_scale": 0.5, "value_scale": 3.0}
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def case(lens, page_size, heads, device, *, dtypes=(BF16, BF16), width=64):
    """``heads``: of queries and of the cache. Keys and values are one tensor until its pages are cut in two."""
    num_heads, num_kv_heads = heads
    generator = torch.Generator().manual_seed(len(lens))
    rows = [torch.randn((length, num_kv_heads, 2, width), generator=generator) for length in lens]
    pool, page_table, seq_lens = paginate(rows, page_size, device)
    caches = [pool[..., index, :].to(dtypes[index]).contiguous() for index in range(2)]
    scales = {name: one for dtype, (name, one) in zip(dtypes, SCALES.items(), strict=True) if dtype == FP8}
    keywords = {"softmax_scale": width**-0.5} | scales
    return (queries(len(lens), num_heads, width, device), *caches, page_table, seq_lens), keywords


def check(arguments, keywords, **more):
    out, lse = gqa_decode(*arguments, **keywords, **more)
    wanted_out, wanted_lse = reference.gqa_decode(*arguments, **keywords)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert_close("out", wanted_out, out, most=BOUND)
    finite = wanted_lse.isfinite()
    assert torch.equal(finite, lse.isfinite())
    assert float((lse.double() - wanted_lse)[finite].abs().max()) <= LSE_BOUND
    return out, lse


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP8, FP8), (FP8, BF16)])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_ragged_lengths_at_the_edges_of_blocks_and_pages(page_size, dtypes, device):
    check(*case([64, 63, 0, 65, 1], page_size, (3, 1), device, dtypes=dtypes), num_splits=1)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP8, FP8)])
def test_long_sequences_in_splits(dtypes, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(tiles, "BLOCK_TOKENS", 256)
    check(*case([1025, 1027], 16, (7, 1), device, dtypes=dtypes, width=128), num_splits=2)


@pytest.mark.parametrize("dtype", [torch.uint8, FP8])
def test_what_was_stored_is_attended_to(dtype, device):
    """Caches of either E4M3 dtype, by the kernels and by the twins, against attention over what was read of them."""
    generator = torch.Generator().manual_seed(4)
    key, value = (torch.randn((37, 2, 64), generator=generator).to(BF16).to(device) for _ in range(2))
    slots = torch.arange(37, device=device) + 16
    caches = [torch.full((4, 16, 2, 64), 0xFF, dtype=torch.uint8, device=device).view(dtype) for _ in range(4)]
    quantize_kv(key, value, slots, *caches[:2], **SCALES)
    kv_cache.quantize_kv(key, value, slots, *caches[2:], **SCALES)
    for index in range(2):
        assert torch.equal(caches[index].view(torch.uint8), caches[index + 2].view(torch.uint8))
    keys, values = dequantize_kv(*caches[:2], slots, dtype=torch.float32, **SCALES)
    assert torch.equal(keys, kv_cache.dequantize_kv(*caches[:2], slots, dtype=torch.float32, **SCALES)[0])
    q = queries(1, 4, 64, device)
    page_table = torch.tensor([[1, 2, 3]], dtype=torch.int32, device=device)
    rest = (page_table, torch.tensor([37], dtype=torch.int32, device=device))
    scores = torch.einsum("hd,thd->ht", q[0].double(), keys.double().repeat_interleave(2, 1)) / 8
    wanted = torch.einsum("ht,thd->hd", scores.softmax(-1), values.double().repeat_interleave(2, 1))
    for decode in (gqa_decode, reference.gqa_decode):
        out, _ = decode(q, *caches[:2], *rest, softmax_scale=1 / 8, **SCALES)
        assert_close("out", wanted, out[0], most=BOUND)


@pytest.mark.parametrize("heads", [(1, 1), (14, 2), (8, 8), (16, 1), (34, 2)])
def test_numbers_of_heads(heads, device):
    check(*case([37], 16, heads, device, dtypes=(FP8, FP8)))


def test_the_page_size_does_not_change_a_bit_nor_a_second_run(device):
    results = []
    for page_size in (1, 64, 64):
        arguments, keywords = case([130, 0], page_size, (3, 1), device)
        results.append(gqa_decode(*arguments, **keywords, num_splits=2))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
    assert not results[0][0][1].any()
    assert results[0][1][1].tolist() == [-math.inf] * 3


@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize("place", [1, 2])
def test_a_nan_that_is_read_is_seen(place, dtype, device, quiet_numpy):
    """Of keys everywhere, of values in its column."""
    arguments, keywords = case([40], 16, (2, 1), device, dtypes=(dtype, dtype))
    page = arguments[3][0, 1].item()
    arguments[place].view(torch.uint8)[page, 3, 0, : dtype.itemsize] = 0xFF
    out, lse = gqa_decode(*arguments, **keywords)
    assert bool(out[..., 0].isnan().all())
    assert bool(out[..., 1].isnan().all()) == bool(lse.isnan().all()) == (place == 1)


def test_scales_are_those_of_keys_and_of_values(device):
    arguments, keywords = case([50], 16, (2, 1), device, dtypes=(FP8, FP8))
    unscaled = keywords | {"key_scale": 1.0, "value_scale": 1.0}
    plain, plain_lse = gqa_decode(*arguments, **unscaled)
    of_values, same_lse = gqa_decode(*arguments, **(unscaled | {"value_scale": 4.0}))
    assert torch.equal(of_values, plain * 4)
    assert torch.equal(same_lse, plain_lse)
    of_keys, _ = gqa_decode(*arguments, **(unscaled | {"key_scale": 2.0}))
    of_both, _ = gqa_decode(*arguments, **(unscaled | {"softmax_scale": 2 * keywords["softmax_scale"]}))
    assert torch.equal(of_keys, of_both)
    assert not torch.equal(of_keys, plain)


def test_the_interpreter_multiplies_numbers_and_no_bit_patterns(device, monkeypatch):
    """Shows the trap: without the way round, a dot of BF16 is off by many powers of ten."""
    if not IS_INTERPRETED:
        pytest.skip("a GPU multiplies BF16")
    arguments, keywords = case([40], 16, (2, 1), device)
    right, _ = check(arguments, keywords)
    monkeypatch.setattr(module, "IS_INTERPRETED", False)
    wrong, _ = gqa_decode(*arguments, **keywords)
    assert not float((wrong - right).abs().nan_to_num(math.inf).max()) < 1.0


def test_two_terms_of_e4m3_are_as_exact_as_bf16():
    """Every BF16 of a magnitude from 256 down to 2**-9 of it, in integers as the interpreter encodes it."""
    if not IS_INTERPRETED:
        pytest.skip("a GPU casts by its own instruction")
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(in_ptr, out_ptr, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        high, low = attention_jit.two_terms(tl.load(in_ptr + at), True)
        tl.store(out_ptr + at, high.to(tl.float32))
        tl.store(out_ptr + SIZE + at, low.to(tl.float32))

    bits = torch.arange(0x3B00, 0x4380, dtype=torch.int16)
    bits = torch.cat([bits, bits | -32768])
    values = torch.zeros(8192)
    values[: len(bits)] = bits.view(torch.bfloat16).float()
    terms = torch.full((2, 8192), math.nan)
    kernel[(1,)](values, terms, SIZE=8192)
    assert torch.equal(terms[0], values.to(FP8).float())
    assert torch.equal(terms[1], (values - terms[0]).to(FP8).float())
    error = (terms.double().sum(0) - values.double()).abs()
    assert bool((error <= (values.double().abs() * 2.0**-8).clamp_min(2.0**-10)).all())


NO_HEADS = torch.zeros((1, 16, 0, 64), dtype=BF16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key_cache": torch.zeros((1, 16, 2, 64), dtype=torch.float16)}, "key_cache must be contiguous BF16"),
        ({"value_cache": torch.zeros((1, 8, 2, 64), dtype=BF16)}, "value_cache .* does not fit"),
        ({"q": torch.zeros((1, 5, 64), dtype=BF16)}, "5 heads do not share 2 heads"),
        ({"q": torch.zeros((1, 4, 128), dtype=BF16)}, "key_cache .* does not fit"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int32)}, "seq_lens must be"),
        ({"key_cache": torch.zeros((1, 16, 4, 64), dtype=BF16)[:, :, ::2]}, r"of strides \(4096, 256, 128, 1\)"),
        ({"key_scale": 2.0}, r"key_cache is BF16, which has no scale beside it, and key_scale is 2\.0"),
        ({"value_scale": math.nan}, "value_scale is nan, not between"),
        ({"value_scale": torch.ones(())}, "value_scale is a number, not a Tensor"),
        ({"key_cache": NO_HEADS, "value_cache": NO_HEADS}, r"caches \(1, 16, 0, 64\) have no heads"),
        ({"value_cache": torch.zeros((1, 16, 2, 64), dtype=BF16, device="meta")}, "value_cache is on meta, q on cpu"),
        ({"num_splits": -1}, "num_splits is -1"),
    ],
)
def test_what_does_not_go_together_is_named(change, words):
    arguments = {
        "q": torch.zeros((1, 4, 64), dtype=BF16),
        "key_cache": torch.zeros((1, 16, 2, 64), dtype=BF16),
        "value_cache": torch.zeros((1, 16, 2, 64), dtype=BF16),
        "page_table": torch.zeros((1, 1), dtype=torch.int32),
        "seq_lens": torch.zeros(1, dtype=torch.int32),
        "softmax_scale": 1.0,
    }
    with pytest.raises(ValueError, match=words):
        gqa_decode(**(arguments | change))
