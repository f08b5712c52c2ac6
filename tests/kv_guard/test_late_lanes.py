"""A late transfer whose content comes long before the tags behind it: what lands in between, and then, is its own."""

import torch

from quantkit.kv_guard.simulation.judge import Injection, Judge
from quantkit.kv_guard.simulation.run import FaultRun, SelfTestPlan, one_thread

GAP = 60  # operations of the stream: several steps


def late_transfers(seed):
    run = FaultRun(SelfTestPlan(seed=seed, single=5, combined=0, only=("1",)))
    for world in run.worlds.values():
        world.link.gap = GAP
    with one_thread(), torch.inference_mode():
        run.run()
    return run


def is_beyond_tags(one: Injection) -> bool:
    """The stated limit: content without a tag was read, and no check that could name it was silent."""
    return one.leaked > 0 and not one.unsaid


def test_what_lands_steps_behind_its_content_is_no_false_positive():
    run = late_transfers(seed=11)
    fired = [one for one in run.injections if one.is_fired]
    assert all(lane.is_done for one in fired for lane in one.lanes), "the tags behind a gap have come"
    for world in run.worlds.values():
        assert world.judge.false_positives == world.judge.leaks == []
    missed = [one for one in fired if not one.is_caught and (one.leaked or one.is_felt or one.unsaid)]
    assert all(is_beyond_tags(one) for one in missed)
    assert 0 < len(missed) < len(fired) / 2


def test_what_was_computed_from_wrong_pages_is_due_to_the_fault_that_spoiled_them():
    judge, fault = Judge(), Injection("1", pages={("decode", 7)}, is_fired=True)
    judge.active = [fault]
    judge.compute("decode", [6], [8])
    judge.compute("decode", [6, 7], [9])
    judge.leak("decode", "r2", [9])
    judge.leak("decode", "r2", [8])
    assert (fault.leaked, judge.leaks) == (1, ["decode: r2 read [('decode', 8)]"])
