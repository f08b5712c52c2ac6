"""Columns of numbers that go to the device together."""

import pytest
import torch

from quantkit.kv_guard.engines.columns import columns_on

LARGEST = (1 << 63) - 1


@pytest.mark.parametrize(
    "columns", [[], [[]], [[], []], [[3]], [range(4), [-1, LARGEST], [], [-LARGEST - 1]]], ids=range(5)
)
def test_each_is_what_it_was(columns):
    on_device = columns_on(torch.device("cpu"), columns)
    assert [one.tolist() for one in on_device] == [list(one) for one in columns]
    assert all(one.dtype == torch.int64 for one in on_device)


def test_a_number_of_more_bits_is_no_int64():
    with pytest.raises(OverflowError):
        columns_on(torch.device("cpu"), [[LARGEST + 1]])
