"""Products with INT4 weights against float64 on the same weights, in both orders of the words."""

import pytest
import torch

from quantkit_kernels.gemm import MAX_KERNEL_TOKENS, dequantize, int4_gemm, run_gemm
from quantkit_kernels.reference import int4 as twin
from quantkit_kernels.tiles import LEAST_TOKENS, DenseShape, GemmTile, gemm_tile
from quantkit_kernels.tuned import Gpu
from quantkit_kernels.word_order import Int4Weight, repack
from tests.kernels.compare import assert_close
from tests.kernels.int4_weights import random_int4

pytestmark = pytest.mark.gpu
# the weight and the output are rounded to BF16 once each, by at most 2**-9 of themselves
BOUND = 2.0**-8


def tokens_of(num_tokens, num_cols, device, dtype=torch.bfloat16):
    return torch.randn((num_tokens, num_cols), generator=torch.Generator().manual_seed(1)).to(dtype).to(device)


@pytest.mark.parametrize("is_repacked", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize(("num_tokens", "num_rows", "num_cols"), [(1, 256, 512), (7, 130, 384), (33, 64, 1024)])
def test_products_come_close_to_float64(num_tokens, num_rows, num_cols, group_size, is_repacked, device):
    weight = random_int4((num_rows, num_cols), group_size, device)
    x = tokens_of(num_tokens, num_cols, device)
    expected = twin.int4_gemm(x.double(), *weight, group_size=group_size)
    given = repack(*weight, group_size=group_size) if is_repacked else weight
    got = int4_gemm(x, *given, group_size=group_size)
    assert got.dtype == torch.bfloat16
    assert_close("product", expected, got, most=BOUND)


@pytest.mark.parametrize("num_tokens", [2, 8, 9, 17, 67, MAX_KERNEL_TOKENS, MAX_KERNEL_TOKENS + 1, 257])
def test_every_number_of_tokens(num_tokens, device):
    weight = random_int4((96, 384), 32, device)
    x = tokens_of(num_tokens, 384, device)
    expected = twin.int4_gemm(x.double(), *weight, group_size=32)
    assert_close("product", expected, int4_gemm(x, *repack(*weight, group_size=32), group_size=32), most=BOUND)


@pytest.mark.parametrize("is_repacked", [True, False])
@pytest.mark.parametrize("num_cols", [32, 96, 160])
def test_columns_that_fill_no_tile(num_cols, is_repacked, device):
    weight = random_int4((70, num_cols), 32, device)
    x = tokens_of(3, num_cols, device)
    given = repack(*weight, group_size=32) if is_repacked else weight
    expected = twin.int4_gemm(x.double(), *weight, group_size=32)
    assert_close("product", expected, int4_gemm(x, *given, group_size=32), most=BOUND)


@pytest.mark.parametrize("is_repacked", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_each_weight_is_code_times_scale_rounded_once(group_size, is_repacked, device):
    """All codes, scales of both signs and many sizes: the bytes of the rounded product."""
    weight = random_int4((67, 384), group_size, device, seed=3)
    weight[1].mul_(torch.exp2(torch.arange(weight[1].numel(), device=device).reshape(weight[1].shape) % 40 - 30.0))
    expected = twin.dequantize_int4(*weight, group_size=group_size).to(torch.bfloat16)
    given = repack(*weight, group_size=group_size) if is_repacked else weight
    got = dequantize(Int4Weight(*given), num_cols=384, group_size=group_size)
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16))
    assert len(((weight[0].unsqueeze(-1) >> torch.arange(0, 32, 4, device=device)) & 15).unique()) == 16
    assert (weight[1] < 0).any()


@pytest.mark.parametrize("is_repacked", [True, False])
def test_subnormal_and_nan_scales_are_decoded(is_repacked, device, quiet_numpy):
    bits = [1, -32767, 3, 0x7F, 0x80, 0x83, 0x17F, 0x7FC0, -64, 0x7F01]
    packed, scale = random_int4((len(bits), 64), 32, device)
    scale[:] = torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16)[:, None]
    given = repack(packed, scale, group_size=32) if is_repacked else Int4Weight(packed, scale)
    wanted = twin.dequantize_int4(packed, scale, group_size=32).to(torch.bfloat16)
    got = dequantize(given, num_cols=64, group_size=32)
    assert wanted.isnan().any()
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nan_and_subnormal_outputs_are_those_of_torch(dtype, split_k, device, quiet_numpy):
    """Of single products: their rounding is all that happens."""
    packed, scale = random_int4((64, 256), 32, device)
    scale[:] = 2.0**-10
    x = torch.zeros((6, 256), dtype=torch.bfloat16, device=device)
    x[:, 0] = torch.tensor([float("nan"), 2.0**-120, 2.0**-123, 2.0**-5, 2.0**-12, 1.0], dtype=torch.bfloat16)
    tile = GemmTile(block_n=64, block_m=8, split_k=split_k)
    got = run_gemm(x, repack(packed, scale, group_size=32), group_size=32, tile=tile, dtype=dtype)
    weight = twin.dequantize_int4(packed, scale, group_size=32)
    wanted = (x[:, :1].float() * weight[:, 0]).to(dtype)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("is_repacked", [True, False])
def test_every_pair_of_nibbles_at_every_place(is_repacked, device):
    """One token picks one column: the product is that column's weights, exactly."""
    first, second = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    pair = (first | second << 4).flatten().to(torch.int32)  # 256 rows, a word of four equal pairs
    packed = (pair | pair << 8 | pair << 16 | pair << 24).unsqueeze(-1).repeat(1, 16).to(device)
    scale = torch.full((256, 1), -0.5, dtype=torch.bfloat16, device=device)
    given = repack(packed, scale, group_size=128) if is_repacked else (packed, scale)
    got = int4_gemm(torch.eye(128, dtype=torch.bfloat16, device=device), *given, group_size=128)
    codes = torch.stack((first.flatten(), second.flatten())).repeat(64, 1).to(device)
    assert torch.equal(got.float(), (codes - 8) * -0.5)


@pytest.mark.parametrize(("block_m", "block_n", "split_k"), [(8, 64, 1), (8, 128, 2), (16, 128, 5), (64, 64, 3)])
def test_tiles_and_splits_change_only_the_order_of_sums(block_m, block_n, split_k, device):
    weight = random_int4((150, 640), 64, device)
    x = tokens_of(19, 640, device)
    tile = GemmTile(block_n=block_n, block_m=block_m, split_k=split_k)
    got = run_gemm(x, repack(*weight, group_size=64), group_size=64, tile=tile)
    assert_close("product", twin.int4_gemm(x.double(), *weight, group_size=64), got, most=BOUND)


def test_eight_warps_give_the_bytes_of_four(device):
    weight = repack(*random_int4((256, 256), 32, device), group_size=32)
    x = tokens_of(5, 256, device)
    got = [
        run_gemm(x, weight, group_size=32, tile=GemmTile(block_n=128, block_m=8, split_k=1, num_warps=num_warps))
        for num_warps in (4, 8)
    ]
    assert torch.equal(*got)


@pytest.mark.parametrize("num_tokens", [1, 40, 200])
def test_two_runs_are_equal_and_outputs_are_all_written(num_tokens, device, poisoned_memory):
    assert torch.empty(3, device=device).isnan().all()
    weight = repack(*random_int4((200, 1024), 32, device), group_size=32)
    x = tokens_of(num_tokens, 1024, device)
    got = [int4_gemm(x, *weight, group_size=32) for _ in range(2)]
    assert torch.equal(*got)
    assert got[0].isfinite().all()


def test_fp16_activations_and_leading_dimensions(device):
    weight = random_int4((64, 256), 32, device)
    x = tokens_of(6, 256, device, torch.float16)
    got = int4_gemm(x.reshape(2, 3, 256), *weight, group_size=32)
    assert (got.shape, got.dtype) == ((2, 3, 64), torch.float16)
    expected = twin.int4_gemm(x.double(), *weight, group_size=32)
    # activations and weights are rounded to BF16, and the output to FP16, which is less
    assert_close("product", expected, got.reshape(6, 64), most=BOUND)
    assert not torch.equal(got, got.to(torch.bfloat16).to(torch.float16))


def test_no_tokens_are_no_work(device):
    weight = random_int4((64, 256), 32, device)
    assert int4_gemm(tokens_of(0, 256, device), *weight, group_size=32).shape == (0, 64)


def test_the_twin_is_the_sum_written_out():
    packed, scale = random_int4((2, 32), 32, "cpu")
    x = tokens_of(1, 32, "cpu").double()
    for row in range(2):
        codes = [((int(packed[row, col // 8]) >> (4 * (col % 8))) & 15) - 8 for col in range(32)]
        total = sum(float(x[0, col]) * code * float(scale[row, 0]) for col, code in enumerate(codes))
        got = twin.int4_gemm(x, packed, scale, group_size=32)[0, row]
        assert float(got) == pytest.approx(total, rel=1e-12)


def test_shapes_of_large_weights_are_split_for_a_whole_gpu():
    one = gemm_tile(DenseShape(512, 6144, 32), num_tokens=1)
    assert (one.block_m, one.split_k) == (LEAST_TOKENS, 8)
    assert gemm_tile(DenseShape(512, 6144, 32), num_tokens=1, gpu=Gpu("", 8)).split_k == 4
    assert gemm_tile(DenseShape(65536, 7168, 32), num_tokens=64).split_k == 1
    assert gemm_tile(DenseShape(6144, 256, 32), num_tokens=1).split_k == 1  # two tiles of columns


def test_a_gradient_is_refused(device):
    """Under no_grad, and of what wants none, it is a product."""
    x, weight = torch.zeros((2, 64), dtype=torch.bfloat16, device=device), random_int4((4, 64), 32, device)
    x.requires_grad_()
    with pytest.raises(RuntimeError, match=r"inference only, .* wrap the call in torch\.no_grad"):
        int4_gemm(x, *weight, group_size=32)
    with torch.no_grad():
        assert int4_gemm(x, *weight, group_size=32).shape == (2, 4)
    assert int4_gemm(x.detach(), *weight, group_size=32).shape == (2, 4)


REPACKED = {
    "weight_packed": torch.zeros((1, 4, 16), dtype=torch.int32),
    "weight_scale": torch.zeros((1, 4, 4), dtype=torch.bfloat16),
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros((1, 64))}, "not torch.float32"),
        ({"x": torch.zeros((), dtype=torch.bfloat16)}, "activations are BF16"),
        ({"x": torch.zeros((1, 128), dtype=torch.bfloat16)}, r"\(4, 128\) in groups of 32 has words \(4, 16\)"),
        ({"weight_packed": torch.zeros((1, 4, 16), dtype=torch.int32)}, r"and scales \(1, 4, 4\), not"),
        ({"weight_packed": torch.zeros(8, dtype=torch.int32)}, "neither as stored nor repacked"),
        ({"weight_packed": torch.zeros((4, 16), dtype=torch.int32)[:, ::2]}, "is not contiguous"),
        (REPACKED | {"group_size": 16}, "group_size is 16, not one of"),
        (REPACKED | {"group_size": 0}, "group_size is 0, not one of"),
        (REPACKED | {"weight_scale": torch.zeros((1, 4, 4), dtype=torch.float16)}, "scales BF16"),
        (REPACKED | {"weight_packed": torch.zeros((1, 8, 16), dtype=torch.int32)[:, ::2]}, "is not contiguous"),
        ({"weight_scale": torch.zeros((4, 2))}, "scales BF16"),
        (
            {"weight_packed": torch.zeros((4, 8), dtype=torch.int32, device="meta")},
            "weight_packed is on meta, x on cpu",
        ),
        ({"weight_scale": torch.zeros((4, 2), dtype=torch.bfloat16, device="meta")}, "weight_scale is on meta"),
        ({"weight_packed": torch.zeros((4, 16), dtype=torch.int32)[:, ::2]}, r"words are .* of strides \(16, 2\)"),
        ({"group_size": 128}, "64 columns has no whole groups of 128"),
    ],
)
def test_what_does_not_go_together_is_named(change, words):
    arguments = {
        "x": torch.zeros((1, 64), dtype=torch.bfloat16),
        "weight_packed": torch.zeros((4, 8), dtype=torch.int32),
        "weight_scale": torch.zeros((4, 2), dtype=torch.bfloat16),
        "group_size": 32,
    }
    with pytest.raises(ValueError, match=words):
        int4_gemm(**(arguments | change))
