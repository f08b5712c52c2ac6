"""The simulation of large machines still fits the scheduler that it runs."""

from pathlib import Path

import pytest

from tests.convert.plans import plan_of

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize("number", range(5))
def test_all_the_work_is_done_on_every_machine(number, tiny_checkpoint, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from simulate_scale import MACHINES, simulate

    machines = MACHINES[number]
    plan = plan_of(tiny_checkpoint(num_shards=16).directory)
    seconds, ideal, spooled = simulate(plan, machines)
    assert seconds >= ideal > 0
    assert (spooled > 0) == (machines.network > 0)
    assert spooled * 2**30 <= sum(shard.file_bytes for shard in plan.checkpoint.shards)


def test_every_machine_is_tried(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from simulate_scale import MACHINES

    assert len(MACHINES) == 5
