"""Ops launch on the device of their arguments, not on the one that happens to be current."""

from contextlib import contextmanager

import pytest
import torch

import quantkit_kernels
from quantkit_kernels import launch


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
    ops = [
        name for name in quantkit_kernels.__all__ if name[0].islower() and name not in {"patch", "repack", "unrepack"}
    ]
    assert len(ops) >= 10
    for name in ops:
        op = getattr(quantkit_kernels, name)
        inner = quantkit_kernels.requantize.quantize if name == "requantize_fp8_to_int4" else op
        assert hasattr(inner, "__wrapped__"), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_product_on_the_second_gpu():
    from quantkit_kernels import int4_gemm, reference
    from tests.kernels.compare import assert_close
    from tests.kernels.test_repack import random_int4

    weight = random_int4((96, 256), 32, "cuda:1")
    x = torch.randn((3, 256), device="cuda:1").to(torch.bfloat16)
    expected = reference.int4_gemm(x.double(), *weight, group_size=32)
    assert_close("product", expected, int4_gemm(x, *weight, group_size=32), most=2.0**-8)
