"""Ops launch on the device of their arguments, not on the one that happens to be current."""

from contextlib import contextmanager

import pytest
import torch

import quantkit_kernels
from quantkit_kernels import launch
from quantkit_kernels.kv_tag_arrays import new_captured, new_expectations, new_ring, new_tags


@pytest.mark.parametrize("order", ["", "x", "xy", "yx"])
def test_the_device_of_the_first_tensor_is_current(order, monkeypatch):
    """Given by place, or by name after whatever else."""
    current = []

    @contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.pop()

    monkeypatch.setattr(launch, "on_device", device_of)

    @launch.launches
    def op(x, *, y=1):
        return list(current), x, y

    x = torch.zeros(1)
    given = {"x": x, "y": 2}
    seen, got, y = op(**{name: given[name] for name in order}) if "x" in order else op(x, y=2)
    assert seen[0] is x is got
    assert y == (1 if order == "x" else 2)
    assert current == []


def test_every_op_is_one_that_launches():
    assert len(CALLS) >= 10
    for name in CALLS:
        op = getattr(quantkit_kernels, name)
        inner = quantkit_kernels.requantize.quantize if name == "requantize_fp8_to_int4" else op
        assert hasattr(inner, "__wrapped__"), name


BF16, BYTES = torch.bfloat16, torch.uint8
SLOTS, ROWS = torch.zeros(1, dtype=torch.int64), torch.zeros((1, 1, 576), dtype=BYTES)
WEIGHT = (torch.zeros((4, 16), dtype=torch.int32), torch.zeros((4, 4), dtype=BF16))
EXPERTS = (torch.zeros((1, 256, 16), dtype=torch.int32), torch.zeros((1, 256, 4), dtype=BF16))
PAGES = (torch.zeros((1, 1), dtype=torch.int32), torch.ones(1, dtype=torch.int32))
HEADS, KEYS = torch.zeros((1, 1, 64), dtype=BF16), torch.zeros((1, 1, 1, 64), dtype=BYTES)
CHECKED = (new_tags(1), new_expectations(1, 1), new_ring(1))
CALLS = {
    "int4_gemm": lambda op: op(torch.zeros((1, 128), dtype=BF16), *WEIGHT, group_size=32),
    "int4_moe": lambda op: op(
        torch.zeros((1, 128), dtype=BF16), *EXPERTS, EXPERTS[0][:, :128], EXPERTS[1][:, :128], *ROUTER, group_size=32
    ),
    "quantize_kv_mla": lambda op: op(
        torch.zeros((1, 512), dtype=BF16), torch.zeros((1, 64), dtype=BF16), SLOTS, ROWS, layout="flat576"
    ),
    "dequantize_kv_mla": lambda op: op(ROWS, SLOTS, layout="flat576"),
    "quantize_kv": lambda op: op(HEADS, HEADS, SLOTS, KEYS, KEYS),
    "dequantize_kv": lambda op: op(KEYS, KEYS, SLOTS),
    "quantize_index_keys": lambda op: op(
        torch.zeros((1, 128), dtype=BF16), SLOTS, torch.zeros((1, 64, 132), dtype=BYTES)
    ),
    "dequantize_index_keys": lambda op: op(torch.zeros((1, 64, 132), dtype=BYTES), SLOTS),
    "mla_decode": lambda op: op(
        torch.zeros((1, 1, 576), dtype=BF16), ROWS, *PAGES, softmax_scale=1.0, layout="flat576"
    ),
    "gqa_decode": lambda op: op(HEADS, KEYS, KEYS, *PAGES, softmax_scale=1.0),
    "grant_pages": lambda op: op(*CHECKED, SLOTS, SLOTS, SLOTS, SLOTS, first_generation=1, step=0),
    "release_pages": lambda op: op(CHECKED[0], CHECKED[2], SLOTS, first_generation=1, step=0),
    "check_pages": lambda op: op(*CHECKED, PAGES[0], SLOTS, SLOTS, page_size=1, by_token=False, most_pages=1, step=0),
    "check_captured": lambda op: op(*CHECKED, new_captured(1, 1), SLOTS, most_pages=1, step=0),
    "check_writes": lambda op: op(*CHECKED, SLOTS, SLOTS, SLOTS, page_size=1, step=0),
    "requantize_fp8_to_int4": lambda op: op(
        torch.zeros((1, 128), dtype=BYTES), torch.ones((1, 1)), group_size=32, scales="absmax", signed=True
    ),
}
ROUTER = (torch.ones((1, 1)), torch.zeros((1, 1), dtype=torch.int32))


@pytest.mark.parametrize("name", CALLS)
def test_without_a_gpu_an_op_says_what_helps(name, monkeypatch):
    monkeypatch.setattr(launch, "IS_INTERPRETED", False)
    op = getattr(quantkit_kernels, name)
    assert set(CALLS) == set(filter(is_op, quantkit_kernels.__all__))
    with pytest.raises(ValueError, match=r"cannot run on cpu: move the tensors to a GPU, set TRITON_INTERPRET=1"):
        CALLS[name](op)


def is_op(name):
    return name[0].islower() and name not in {"patch", "repack", "unrepack"}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_product_on_the_second_gpu():
    from quantkit_kernels import int4_gemm, reference
    from tests.kernels.compare import assert_close
    from tests.kernels.int4_weights import random_int4

    weight = random_int4((96, 256), 32, "cuda:1")
    x = torch.randn((3, 256), device="cuda:1").to(torch.bfloat16)
    expected = reference.int4_gemm(x.double(), *weight, group_size=32)
    assert_close("product", expected, int4_gemm(x, *weight, group_size=32), most=2.0**-8)
