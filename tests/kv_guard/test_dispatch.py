"""A guard that runs the kernels comes to the verdicts of one that runs their twins."""

import numpy as np
import pytest
import torch

from quantkit.kv_guard.dispatch import ops_for, twins
from quantkit.kv_guard.identity import PoolIdentity
from quantkit.kv_guard.page_tags import PageTagTracker
from quantkit.kv_guard.settings import GuardSettings, PoolSize
from quantkit.kv_guard.tracker import Mode, Step


def numbers(*values):
    return torch.tensor(values, dtype=torch.int64)


def verdicts_of(ops):
    """Two requests; then the page of one is released under it and granted to the other, twice, and another is moved."""
    size = PoolSize(num_pages=12, page_size=4, num_rows=2, most_pages=4)
    identity = PoolIdentity(model="tiny", layout="pages of 4")
    tracker = PageTagTracker(GuardSettings(identity=identity, size=size, mode=Mode.ABORT, first_generation=1))
    tracker._ops = ops
    table, verdicts = torch.zeros(2, 4, dtype=torch.int32), []
    for row, pages in enumerate(([3, 4], [5, 6])):
        tracker.open(row, f"r{row}")
        tracker.grant(numbers(*pages), numbers(row, row), numbers(0, 1), numbers(row + 70, row + 80))
        table[row, :2] = torch.tensor(pages)

    def run():
        step = tracker.before_step(Step(table=table, rows=numbers(0, 1), lengths=numbers(7, 8), most_pages=2))
        tracker.check_writes(numbers(18, 26, -1), numbers(0, 1, 0), numbers(6, 7, 0))
        tracker.after_step()
        verdict = tracker.verdict(step)
        faults = sorted((one.fault, one.check, str(one.request), one.evidence.page) for one in verdict.violations)
        verdicts.append((faults, verdict.lost, sorted(verdict.aborted)))

    run()
    tracker.release(numbers(4))
    tracker.grant(numbers(4, 5), numbers(1, 1), numbers(2, 3), numbers(8, 9))
    run()
    tracker.move(numbers(6), numbers(9), numbers(1), numbers(1))
    table[1, 1] = 9
    run()
    return verdicts


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, and this pool is on the CPU")
def test_verdicts_of_kernels_are_those_of_the_twins():
    with np.errstate(all="ignore"):  # the interpreter's integers are numpy's
        kernels = verdicts_of(ops_for(torch.device("cuda")))
    assert kernels == verdicts_of(ops_for(torch.device("cpu")))
    assert [len(faults) for faults, _, _ in kernels] == [2, 9, 9]  # what was spoiled is so where it was moved to


def test_there_is_a_kernel_for_every_op_that_a_guard_calls():
    kernels = ops_for(torch.device("cuda"))
    assert kernels is not twins
    assert ops_for(torch.device("cpu")) is twins
    for op in ("grant_pages", "release_pages", "check_pages", "check_captured", "check_writes"):
        assert callable(getattr(kernels, op))
