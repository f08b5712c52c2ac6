"""Routed experts with INT4 weights against float64 on the same weights, for every way in which tokens may choose."""

import pytest
import torch

from quantkit_kernels.moe import Router, int4_moe, run_moe
from quantkit_kernels.moe_align import sort_by_expert
from quantkit_kernels.reference import int4 as twin
from quantkit_kernels.tiles import LEAST_TOKENS, MoeShape, MoeTile, moe_tile
from quantkit_kernels.word_order import Int4Weight
from tests.kernels.compare import assert_close
from tests.kernels.int4_weights import COLS, experts, repacked, router, tokens

pytestmark = pytest.mark.gpu
# weights, hidden values, outputs of experts and the sum: each is rounded to BF16 once, by at most 2**-9 of itself
BOUND = 2.0**-7


def check(x, weights, routing, *, is_repacked=True, group_size=32, expert_map=None, most=BOUND):
    expected = twin.int4_moe(x.double(), *weights, *routing, group_size=group_size, expert_map=expert_map)
    given = repacked(weights, group_size) if is_repacked else weights
    got = int4_moe(x, *given, *routing, group_size=group_size, expert_map=expert_map)
    assert got.dtype == x.dtype
    assert_close("experts", expected, got, most=most)
    return got


@pytest.mark.parametrize("is_repacked", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_experts_come_close_to_float64(num_tokens, group_size, is_repacked, device, poisoned_memory):
    weights = experts(device, group_size=group_size, width=128)
    routing = router(num_tokens, device)
    check(tokens(num_tokens, device), weights, routing, is_repacked=is_repacked, group_size=group_size)


def test_the_twin_is_the_sum_written_out():
    """One product of a vector for each choice; the second token's choices are the same, and one names no expert."""
    weights, (weight, ids) = experts("cpu"), router(3, "cpu")
    ids[1], ids[2, 0] = 3, 9
    x = tokens(3, "cpu").double()
    total = torch.zeros_like(x)
    for token, choice in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1)]:
        gate_up, gate_up_scale, down, down_scale = (one[ids[token, choice]] for one in weights)
        gate, up = (twin.dequantize_int4(gate_up, gate_up_scale, group_size=32).double() @ x[token]).chunk(2)
        hidden = gate / (1 + (-gate).exp()) * up
        out = twin.dequantize_int4(down, down_scale, group_size=32).double() @ hidden
        total[token] += weight[token, choice].double() * out
    assert_close("twin", total, twin.int4_moe(x, *weights, weight, ids, group_size=32), most=2.0**-40)


@pytest.mark.parametrize("num_tokens", [2, 20])
def test_all_tokens_on_the_same_experts(num_tokens, device, poisoned_memory):
    weight, ids = router(num_tokens, device)
    ids[:] = torch.tensor([3, 0], dtype=torch.int32)
    check(tokens(num_tokens, device), experts(device), (weight, ids))


@pytest.mark.parametrize("num_tokens", [2, 20])
def test_an_expert_that_is_chosen_twice_counts_twice(num_tokens, device):
    weight, ids = router(num_tokens, device)
    ids[:] = 2
    check(tokens(num_tokens, device), experts(device), (weight, ids))


@pytest.mark.parametrize("num_tokens", [3, 7])
def test_experts_of_other_ranks_add_nothing_and_ranks_sum_up(num_tokens, device, poisoned_memory):
    """Eight experts on two ranks, dealt in turns."""
    weights = experts(device, num_experts=8)
    routing = router(num_tokens, device, num_experts=8, top_k=3)
    x = tokens(num_tokens, device)
    total = torch.zeros(x.shape, dtype=torch.float64, device=device)
    for rank in range(2):
        expert_map = torch.full((8,), -1, dtype=torch.int32, device=device)
        expert_map[rank::2] = torch.arange(4, dtype=torch.int32, device=device)
        own = tuple(one[rank::2].contiguous() for one in weights)
        total += check(x, own, routing, expert_map=expert_map, most=BOUND).double()
    assert_close("ranks", twin.int4_moe(x.double(), *weights, *routing, group_size=32), total, most=BOUND)


@pytest.mark.parametrize("num_tokens", [2, 9])
def test_ids_that_name_no_expert_add_nothing(num_tokens, device, poisoned_memory):
    weight, ids = router(num_tokens, device)
    ids[0] = torch.tensor([4711, 2], dtype=torch.int32)
    ids[1] = -1
    got = check(tokens(num_tokens, device), experts(device), (weight, ids))
    assert (got[1] == 0).all()


@pytest.mark.parametrize("num_tokens", [2, 9])
def test_numbers_of_64_bits_are_not_cut(num_tokens, device, poisoned_memory):
    """Experts 0 to 2 by their lower halves."""
    weight, ids = router(num_tokens, device)
    ids = ids.long()
    ids[0], ids[1, 0] = torch.tensor([1 << 32, -(1 << 32)]), (1 << 33) + 2
    check(tokens(num_tokens, device), experts(device), (weight, ids))
    expert_map = torch.tensor([1, 1 << 32, -(1 << 32) + 1, 3], device=device)
    check(tokens(num_tokens, device), experts(device), router(num_tokens, device), expert_map=expert_map)


@pytest.mark.parametrize("num_tokens", [2, 9])
def test_a_map_of_no_experts_adds_nothing(num_tokens, device, poisoned_memory):
    no_map = torch.zeros(0, dtype=torch.int32, device=device)
    weights, routing = experts(device), router(num_tokens, device)
    assert (int4_moe(tokens(num_tokens, device), *weights, *routing, group_size=32, expert_map=no_map) == 0).all()
    assert (twin.int4_moe(tokens(num_tokens, device), *weights, *routing, group_size=32, expert_map=no_map) == 0).all()


@pytest.mark.parametrize(("num_cols", "width"), [(160, 96), (384, 32), (128, 192)])
@pytest.mark.parametrize("num_tokens", [1, 11])
def test_sizes_that_fill_no_tile(num_tokens, num_cols, width, device, poisoned_memory):
    weights = experts(device, num_cols=num_cols, width=width)
    check(tokens(num_tokens, device, num_cols=num_cols), weights, router(num_tokens, device))


@pytest.mark.parametrize(
    ("is_sorted", "block_m", "split_k"), [(True, 8, 2), (True, 64, 3), (True, 16, 1), (False, 8, 1), (False, 16, 3)]
)
def test_tiles_change_only_the_order_of_sums(is_sorted, block_m, split_k, device, poisoned_memory):
    weights, x, routing = experts(device), tokens(7, device), router(7, device)
    tile = MoeTile(gate_up_n=64, down_n=128, block_m=block_m, split_k=split_k, is_sorted=is_sorted)
    given = repacked(weights)
    out = run_moe(x, Int4Weight(*given[:2]), Int4Weight(*given[2:]), Router(*routing), tile=tile, group_size=32)
    assert_close("experts", twin.int4_moe(x.double(), *weights, *routing, group_size=32), out, most=BOUND)


@pytest.mark.parametrize("num_tokens", [1, 12])
def test_two_runs_are_equal_and_a_token_does_not_depend_on_others(num_tokens, device):
    weights = repacked(experts(device))
    x, (weight, ids) = tokens(num_tokens, device), router(num_tokens, device)
    first = int4_moe(x, *weights, weight, ids, group_size=32)
    assert torch.equal(first, int4_moe(x, *weights, weight, ids, group_size=32))
    order = torch.arange(num_tokens - 1, -1, -1, device=device)
    assert torch.equal(int4_moe(x[order], *weights, weight[order], ids[order], group_size=32), first[order])


def test_fp16_and_int64_ids(device):
    weight, ids = router(7, device)
    check(tokens(7, device, dtype=torch.float16), experts(device), (weight, ids.long()), most=1.5 * BOUND)


def test_a_map_may_be_a_slice(device):
    weights, x, routing = repacked(experts(device)), tokens(3, device), router(3, device)
    expert_map = torch.tensor([1, -1, 0, 2, -1, 0, 3, 1], dtype=torch.int32, device=device)[::2]
    got = int4_moe(x, *weights, *routing, group_size=32, expert_map=expert_map)
    assert torch.equal(got, int4_moe(x, *weights, *routing, group_size=32, expert_map=expert_map.contiguous()))


def test_repacked_scales_of_another_dtype_are_refused(device):
    """As ``model.half()`` would leave them: their bits would be read as BF16."""
    words, scale, *down = repacked(experts(device))
    with pytest.raises(ValueError, match=r"scales BF16, not torch\.int32 and torch\.float16"):
        int4_moe(tokens(2, device), words, scale.half(), *down, *router(2, device), group_size=32)


def test_no_tokens_are_no_work(device):
    assert int4_moe(tokens(0, device), *experts(device), *router(0, device), group_size=32).shape == (0, COLS)


@pytest.mark.parametrize("block_m", [8, 16])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 256, 8), (300, 256, 8), (70, 384, 8), (5, 3, 2)])
def test_pairs_are_sorted_by_expert(num_tokens, num_experts, top_k, block_m, device):
    _, ids = router(num_tokens, device, num_experts=num_experts, top_k=top_k)
    routing = sort_by_expert(ids, num_experts=num_experts, block_m=block_m)
    num_blocks = int(routing.num_blocks)
    assert num_blocks <= len(routing.experts)
    flat, seen = ids.flatten().tolist(), []
    blocks = routing.pairs.reshape(-1, block_m)[:num_blocks].tolist()
    found = routing.experts[:num_blocks].tolist()
    assert found == sorted(found)
    for expert, block in zip(found, blocks, strict=True):
        real = [pair for pair in block if pair < len(flat)]
        assert real == block[: len(real)]
        assert real
        assert [flat[pair] for pair in real] == [expert] * len(real)
        seen += real
    assert sorted(seen) == list(range(len(flat)))
    assert seen == sorted(seen, key=lambda pair: (flat[pair], pair))
    assert (routing.pairs.reshape(-1, block_m)[num_blocks:] == len(flat)).all()


def test_few_tokens_are_not_sorted_and_fill_the_gpu():
    glm = MoeShape(256, 256, 6144, 32, 8)
    one = moe_tile(glm, num_tokens=1)
    assert (one.is_sorted, one.block_m, one.split_k) == (False, LEAST_TOKENS, 8)
    blocks = [moe_tile(glm, num_tokens=number).block_m for number in (8, 64, 512, 4096)]
    assert blocks == [LEAST_TOKENS, LEAST_TOKENS, 32, 64]


def test_a_rank_has_its_share_of_the_pairs():
    """A small block, and as many programs, as for all experts on all ranks; without a map every pair is here."""
    rank = MoeShape(32, 256, 6144, 32, 8)
    assert moe_tile(rank, num_tokens=64, num_global=256).block_m == LEAST_TOKENS
    assert moe_tile(rank, num_tokens=64).block_m == 32
    assert [moe_tile(rank, num_tokens=number, num_global=256).split_k for number in (1, 64)] == [8, 2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros((2, COLS))}, "not torch.float32"),
        ({"x": torch.zeros((2, 128), dtype=torch.bfloat16)}, r"gate_up \(4, 128, 128\) in groups of 32 has words"),
        ({"down_packed": torch.zeros((4, 2, 256, 16), dtype=torch.int32)}, "both as stored"),
        (
            {"down_packed": torch.zeros((3, 256, 8), dtype=torch.int32)},
            r"gate_up has words|down \(4, 256, 64\) in groups",
        ),
        ({"topk_ids": torch.zeros((2, 3), dtype=torch.int32)}, "2 tokens, weights"),
        ({"group_size": 64}, "in groups of 64 has words"),
        ({"group_size": 16}, "group_size is 16, not one of"),
        (
            {"x": torch.zeros((1, 2, COLS), dtype=torch.bfloat16)},
            r"\[tokens, columns\], not torch.bfloat16 \(1, 2, 256\)",
        ),
        ({"x": torch.zeros(COLS, dtype=torch.bfloat16)}, r"\[tokens, columns\]"),
        ({"gate_up_packed": torch.zeros((4, 256, 128), dtype=torch.int32)[..., ::4]}, "gate_up"),
        ({"gate_up_packed": torch.zeros((4, 127, 32), dtype=torch.int32)}, "gate_up"),
        ({"topk_ids": torch.zeros((2, 2))}, "topk_ids is int32 or int64"),
        ({"expert_map": torch.zeros(4)}, "expert_map is int32 or int64"),
        ({"expert_map": torch.zeros((4, 1), dtype=torch.int32)}, r"expert_map is \[global experts\], not \(4, 1\)"),
        ({"expert_map": torch.zeros((), dtype=torch.int32)}, r"expert_map is \[global experts\], not \(\)"),
        ({"topk_weights": torch.zeros((2, 2), device="meta")}, "topk_weights is on meta, x on cpu"),
        ({"topk_ids": torch.zeros((2, 2), dtype=torch.int64, device="meta")}, "topk_ids is on meta"),
        ({"expert_map": torch.zeros(4, dtype=torch.int32, device="meta")}, "expert_map is on meta"),
        ({"topk_ids": torch.zeros((), dtype=torch.int64)}, r"ids \(\)"),
        ({"topk_weights": torch.zeros((2, 2), dtype=torch.int32)}, "topk_weights are floats, not torch.int32"),
    ],
)
def test_what_does_not_go_together_is_named(change, words):
    names = ("gate_up_packed", "gate_up_scale", "down_packed", "down_scale")
    arguments = dict(zip(names, experts("cpu"), strict=True)) | {"x": tokens(2, "cpu"), "group_size": 32}
    arguments |= dict(zip(("topk_weights", "topk_ids"), router(2, "cpu"), strict=True))
    with pytest.raises(ValueError, match=words):
        int4_moe(**(arguments | change))


def test_a_gradient_is_refused(device):
    weights, (weight, ids) = experts(device), router(2, device)
    for x, router_weight in (
        (tokens(2, device).requires_grad_(), weight),
        (tokens(2, device), weight.clone().requires_grad_()),
    ):
        with pytest.raises(RuntimeError, match="inference only"):
            int4_moe(x, *weights, router_weight, ids, group_size=32)


@pytest.mark.parametrize("is_repacked", [True, False])
def test_experts_beyond_2_to_the_31_words_are_found(is_repacked, device):
    """Of memory that is only asked for: nothing but the last experts is ever touched."""
    few, many, width, cols = 2, (1 << 20) + 2, 64, 128
    weights = experts(device, num_experts=few, num_cols=cols, width=width)
    stored = repacked(weights) if is_repacked else weights
    vast = []
    for tensor in stored:
        whole = torch.empty((many, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
        whole[-few:] = tensor
        vast.append(whole)
    assert (many - few) * vast[0][0].numel() >= 1 << 31
    x, (weight, ids) = tokens(2, device, num_cols=cols), router(2, device, num_experts=few)
    got = int4_moe(x, *vast, weight, ids + (many - few), group_size=32)
    assert torch.equal(got, int4_moe(x, *stored, weight, ids, group_size=32))
