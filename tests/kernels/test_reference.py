"""The twins refuse what they would take for something else."""

import pytest
import torch

from quantkit_kernels import reference
from tests.kernels.int4_weights import experts, random_int4, repacked, router, tokens


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_packed": torch.zeros((1, 4, 16), dtype=torch.int32)}, "2 dimensions of a checkpoint: unrepack"),
        ({"weight_packed": torch.zeros((4, 8), dtype=torch.int32)}, r"words \(4, 8\) do not go with activations"),
        ({"weight_packed": torch.zeros((4, 16))}, r"words torch.float32 \(4, 16\) have int32"),
        ({"group_size": 64}, r"and scales \(4, 2\), not \(4, 4\)"),
        ({"x": torch.zeros(())}, r"do not go with activations \(\)"),
    ],
)
def test_products_of_other_weights_are_refused(change, words):
    weight_packed, weight_scale = random_int4((4, 128), 32, "cpu")
    arguments = {"x": torch.zeros((2, 128)), "weight_packed": weight_packed, "weight_scale": weight_scale}
    with pytest.raises(ValueError, match=words):
        reference.int4_gemm(**(arguments | {"group_size": 32} | change))


@pytest.mark.parametrize(
    ("ids", "weights"),
    [
        (torch.zeros((2, 2)), torch.zeros((2, 2))),
        (torch.zeros((2, 2), dtype=torch.int64), torch.zeros((2, 3))),
        (torch.zeros((3, 2), dtype=torch.int64), torch.zeros((3, 2))),
        (torch.zeros((), dtype=torch.int64), torch.zeros(())),
    ],
)
def test_routers_of_another_shape_are_refused(ids, weights):
    with pytest.raises(ValueError, match=r"topk_ids are integers \[2, k\]"):
        reference.int4_moe(tokens(2, "cpu"), *experts("cpu"), weights, ids, group_size=32)


def test_repacked_experts_are_refused():
    with pytest.raises(ValueError, match="3 dimensions of a checkpoint: unrepack"):
        reference.int4_moe(tokens(2, "cpu"), *repacked(experts("cpu")), *router(2, "cpu"), group_size=32)
