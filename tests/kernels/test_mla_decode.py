"""MLA decode gives what float64 gives from the same rows, whatever the pages, splits and heads.

BOUND: rounding to BF16 is off by at most 2**-8 of the power of two below a value, by half of that on the mean: 2**-9.
Probabilities are rounded likewise in the BF16 layout, to 2**-12 in the others; they are weights of a mean, in which
such errors of either sign cancel, so another 2**-9 is ample. The interpreter rounds no probability.
"""

import math

import pytest
import torch

from quantkit_kernels import split_kv, tiles
from quantkit_kernels.fp8_kv import quantize_kv_mla
from quantkit_kernels.kv_layout import row_bytes
from quantkit_kernels.mla import mla_decode
from quantkit_kernels.reference import attention as reference
from quantkit_kernels.reference import kv_cache
from tests.kernels import paged
from tests.kernels.compare import assert_close, relative_mean
from tests.kernels.paged import LATENT, ROPE, SCALE, mla_rows, paginate, queries

pytestmark = pytest.mark.gpu

BOUND = 2.0**-8
LSE_BOUND = 2.0**-10  # float32 sums of some hundred products, and FP8 sums of 14 bits on the GPU
LAYOUTS = ["bf16", "flat576", "dsa656"]


@pytest.fixture
def large_steps(device, monkeypatch):
    """The interpreter takes few large steps faster than many small ones; several blocks are left in long sequences."""
    if device == "cpu":
        monkeypatch.setattr(tiles, "BLOCK_TOKENS", 256)


def options(layout, *, latent=None, rope=ROPE):
    latent = latent or LATENT[layout]
    scale = {"scale": SCALE} if layout == "flat576" else {}
    return {"softmax_scale": (latent + rope) ** -0.5, "layout": layout, "rope_dim": rope} | scale


def case(layout, lens, page_size, num_heads, device, *, latent=None, rope=ROPE):
    latent = latent or LATENT[layout]
    rows = [mla_rows(layout, length, latent=latent, rope=rope, seed=index) for index, length in enumerate(lens)]
    pages = paginate(rows, page_size, device)
    return (queries(len(lens), num_heads, latent + rope, device), *pages), options(layout, latent=latent, rope=rope)


def check(arguments, keywords, **more):
    out, lse = mla_decode(*arguments, **keywords, **more)
    wanted_out, wanted_lse = reference.mla_decode(*arguments, **keywords)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert_close("out", wanted_out, out, most=BOUND)
    finite = wanted_lse.isfinite()
    assert torch.equal(finite, lse.isfinite())
    assert float((lse.double() - wanted_lse)[finite].abs().max()) <= LSE_BOUND
    return out, lse


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_stored_is_attended_to(layout, device):
    """Rows of ``quantize_kv_mla``, tiles of very different sizes, against attention over what the twin reads."""
    rows = torch.randn((37, 512 + 64), generator=torch.Generator().manual_seed(3))
    rows[:, :512] *= torch.tensor([1.0, 3.0, 0.02, 2.0]).repeat_interleave(128)
    values = rows.to(torch.bfloat16).to(device)
    scale = {"scale": SCALE} if layout == "flat576" else {}
    slots = torch.arange(37, device=device) + 16
    cache = torch.full((4, 16, row_bytes(layout)), 0xFF, dtype=torch.uint8, device=device)
    quantize_kv_mla(values[:, :512], values[:, 512:], slots, cache, layout=layout, **scale)
    keys = torch.cat(kv_cache.dequantize_kv_mla(cache, slots, layout=layout, dtype=torch.float32, **scale), 1).double()
    # what is compared with is what was stored: E4M3 rounds by 2**-5 on the mean
    assert relative_mean(values, keys) <= 2.0**-5
    q = queries(1, 3, 512 + 64, device)
    page_table = torch.tensor([[1, 2, 3]], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([37], dtype=torch.int32, device=device)
    out, _ = mla_decode(q, cache, page_table, seq_lens, **options(layout, latent=512, rope=64))
    wanted = (q[0].double() @ keys.T * 576**-0.5).softmax(-1) @ keys[:, :512]
    assert_close("out", wanted, out[0], most=BOUND)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_real_width(layout, device):
    check(*case(layout, [65], 64, 7, device, latent=512, rope=64))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged_lengths_at_the_edges_of_blocks_and_pages(layout, page_size, device):
    check(*case(layout, [64, 63, 0, 65, 1], page_size, 3, device), num_splits=1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("large_steps")
def test_long_sequences_in_splits(layout, device):
    check(*case(layout, [1025, 1, 1027], 16, 7, device), num_splits=3)


@pytest.mark.parametrize(("num_seqs", "num_heads"), [(1, 1), (7, 2), (1, 16), (2, 64)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("large_steps")
def test_numbers_of_sequences_and_heads(layout, num_seqs, num_heads, device):
    check(*case(layout, [37 + index for index in range(num_seqs)], 16, num_heads, device), num_splits=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_page_size_does_not_change_a_bit(layout, device):
    """Blocks are of tokens, not of pages: the same numbers meet in the same order."""
    results = []
    for page_size in (1, 64):
        arguments, keywords = case(layout, [130], page_size, 3, device)
        results.append(mla_decode(*arguments, **keywords, num_splits=2))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_splits_change_only_roundings_and_two_runs_nothing(device):
    arguments, keywords = case("flat576", [200, 0, 70], 16, 3, device)
    whole, whole_lse = check(arguments, keywords, num_splits=1)
    for num_splits in (2, 5):
        out, lse = check(arguments, keywords, num_splits=num_splits)
        again = mla_decode(*arguments, **keywords, num_splits=num_splits)
        assert torch.equal(out, again[0])
        assert torch.equal(lse, again[1])
        assert_close("out", whole, out, most=BOUND)
        assert torch.equal(whole_lse.isfinite(), lse.isfinite())


def test_no_tokens_are_zeros_and_minus_infinity(device):
    for num_splits in (1, 2):
        arguments, keywords = case("dsa656", [3, 0], 16, 3, device)
        out, lse = mla_decode(*arguments, **keywords, num_splits=num_splits)
        assert not out[1].any()
        assert lse[1].tolist() == [-math.inf] * 3


def test_halves_are_joined_by_their_lse(device):
    """The merge is linear: what an engine does with a shared prefix."""
    rows = mla_rows("flat576", 150)
    q, keywords = queries(1, 3, LATENT["flat576"] + ROPE, device), options("flat576")
    whole, whole_lse = mla_decode(q, *paginate([rows], 16, device), **keywords)
    halves = [mla_decode(q, *paginate([half], 16, device), **keywords) for half in (rows[:70], rows[70:])]
    lse = torch.stack([half[1].double() for half in halves])
    weight = lse.softmax(0)[..., None]
    joined = sum(weight[index] * halves[index][0].double() for index in range(2))
    assert_close("out", joined, whole, most=BOUND)
    assert float((lse.logsumexp(0) - whole_lse.double()).abs().max()) <= LSE_BOUND


def test_every_output_is_written_and_no_unwritten_part_is_read(device, poisoned_memory):
    """All that the host allocates begins as NaN; one of four splits has no tokens."""
    assert torch.empty(3, device=device).isnan().all()
    arguments, keywords = case("bf16", [130, 0], 16, 3, device)
    out, lse = check(arguments, keywords, num_splits=4)
    assert bool(out.isfinite().all())
    assert not bool(lse.isnan().any())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_that_is_read_is_seen(layout, device, quiet_numpy):
    (q, pool, page_table, seq_lens), keywords = case(layout, [40], 16, 3, device)
    pool[page_table[0, 1].item(), 3] = 0xFF
    out, lse = mla_decode(q, pool, page_table, seq_lens, **keywords, num_splits=2)
    assert bool(out.isnan().all())
    assert bool(lse.isnan().all())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_an_infinite_query_is_seen(device):
    (q, *rest), keywords = case("flat576", [40], 16, 2, device)
    q[0, 1, 7] = math.inf
    out, lse = mla_decode(q, *rest, **keywords, num_splits=1)
    assert bool(out[0, 1].isnan().all())
    assert bool(lse[0, 1].isnan())
    assert bool(out[0, 0].isfinite().all())


def test_tile_scales_of_any_size_keep_their_precision(device):
    """FP16 would hold neither: probabilities times a scale are taken relative to the largest."""
    for exponent in (-30.0, 25.0):
        rows = mla_rows("dsa656", 40)
        rows[:, 512:528].view(torch.float32).mul_(2.0**exponent)
        q = queries(1, 3, 512 + ROPE, device)
        q[..., :512] *= 2.0 ** -max(exponent, 0)
        check((q, *paginate([rows], 16, device)), options("dsa656"), num_splits=1)


def test_pages_beyond_two_gigabytes(device):
    """Of a pool that is never written but in one page, 2**31 bytes and elements behind its begin."""
    rows = mla_rows("flat576", 30)
    page = 2**31 // (64 * rows.shape[1]) + 5
    pool = torch.empty((page + 1, 64, rows.shape[1]), dtype=torch.uint8, device=device)
    pool[page, :30] = rows.to(device)
    page_table = torch.tensor([[page]], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([30], dtype=torch.int32, device=device)
    q, keywords = queries(1, 3, LATENT["flat576"] + ROPE, device), options("flat576")
    got = mla_decode(q, pool, page_table, seq_lens, **keywords)
    wanted = reference.mla_decode(q, *paginate([rows], 64, device), **keywords)
    assert_close("out", wanted[0], got[0], most=BOUND)


def test_the_plan_of_splits_fills_the_gpu():
    assert split_kv.plan_splits(1, 1, 264) == 1
    assert split_kv.plan_splits(64, 512, 264) == 4
    assert split_kv.plan_splits(264, 512, 264) == 1
    assert 128 <= split_kv.plan_splits(1, 2048, 264) <= 256
    assert split_kv.plan_splits(1, 0, 264) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": "flat"}, "not one of bf16, flat576, dsa656"),
        ({"layout": "bf16"}, "a row of bf16 has 320 bytes, not 160"),
        ({"rope_dim": 48}, "not powers of two"),
        ({"layout": "dsa656"}, "dsa656 is decoded with 512 latent columns, not 128"),
        ({"num_splits": 0}, "num_splits is 0"),
        ({"q": torch.zeros((1, 2, 160))}, "q must be contiguous BF16"),
        ({"cache": torch.zeros((1, 3, 160), dtype=torch.uint8)}, "page size is 3"),
        ({"cache": torch.zeros((1, 160), dtype=torch.uint8)}, "cache must be contiguous uint8"),
        ({"page_table": torch.zeros((2, 1), dtype=torch.int32)}, "page_table must be"),
        (
            {"cache": torch.zeros(16 * 160 + 4, dtype=torch.uint8)[4:].view(1, 16, 160)},
            "cache must begin at a multiple",
        ),
        ({"q": torch.zeros((1, 160, 2), dtype=torch.bfloat16).mT}, r"of strides \(320, 1, 2\)"),
        ({"cache": torch.zeros((1, 16, 160), dtype=torch.uint8, device="meta")}, "cache is on meta, q on cpu"),
        ({"page_table": torch.zeros((1, 1), dtype=torch.int32, device="meta")}, "page_table is on meta"),
        ({"seq_lens": torch.zeros(1, dtype=torch.int32, device="meta")}, "seq_lens is on meta"),
        ({"scale": 0.0}, r"scale is 0\.0, not between"),
        ({"scale": -1.0}, r"scale is -1\.0, not between"),
        ({"scale": math.nan}, "scale is nan"),
        ({"scale": torch.ones(())}, r"scale is a number, not a Tensor: give scale\.item"),
        ({"seq_lens": torch.zeros(1, dtype=torch.int64)}, "seq_lens must be contiguous int32"),
    ],
)
def test_what_does_not_go_together_is_named(change, words):
    arguments = {
        "q": torch.zeros((1, 2, 160), dtype=torch.bfloat16),
        "cache": torch.zeros((1, 16, 160), dtype=torch.uint8),
        "page_table": torch.zeros((1, 1), dtype=torch.int32),
        "seq_lens": torch.zeros(1, dtype=torch.int32),
        "softmax_scale": 1.0,
        "layout": "flat576",
        "rope_dim": 32,
    }
    with pytest.raises(ValueError, match=words):
        mla_decode(**(arguments | change))


def test_a_scale_of_rows_that_have_none_is_refused(device):
    arguments, keywords = case("bf16", [3], 16, 3, device)
    with pytest.raises(ValueError, match="bf16 rows have no scale beside them"):
        mla_decode(*arguments, **(keywords | {"scale": 0.5}))


def test_rows_are_what_the_layout_says():
    """Literals: E4M3 0x38 is 1, 0x40 is 2, BF16 0x3F80 is 1."""
    flat = torch.full((1, 128 + ROPE), 0x40, dtype=torch.uint8)
    assert reference.mla_rows(flat, layout="flat576", scale=0.25, latent_dim=128).unique().tolist() == [0.5]
    tiles = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(torch.uint8)
    rope = torch.full((ROPE,), 0x3F80, dtype=torch.int16).view(torch.uint8)
    row = torch.cat([torch.full((512,), 0x38, dtype=torch.uint8), tiles, rope])[None]
    values = reference.mla_rows(row, layout="dsa656", scale=1.0, latent_dim=512)[0]
    assert values[::128].tolist() == [1.0, 2.0, 4.0, 8.0, 1.0]
    assert paged.mla_rows("dsa656", 2, latent=512, rope=64).shape == (2, 656)
