"""The simulated engine: its faults are real, the guard sees them all, and names nothing else."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from quantkit.kv_guard.simulation.faults.kinds import KINDS
from quantkit.kv_guard.simulation.judge import Injection, Judge
from quantkit.kv_guard.simulation.report import KindCount
from quantkit.kv_guard.simulation.run import FaultRun, SelfTestPlan, self_test
from quantkit.kv_guard.simulation.shapes import SMALL
from quantkit.kv_guard.simulation.truth import Place
from quantkit.kv_guard.simulation.world import World
from quantkit.kv_guard.tracker import NullTracker, Verdict
from quantkit.kv_guard.violations import read_line
from quantkit_kernels.kv_tag_arrays import LINE_WORDS, Check, Word

SHORT = SelfTestPlan(seed=3, checks=9_000, single=1, combined=1, content=True)


@pytest.fixture(scope="module")
def report():
    return self_test(SHORT)


def test_every_kind_of_fault_is_caught_and_nothing_else_is_named(report):
    assert [one.kind for one in report.kinds] == list(KINDS)
    for one in report.kinds:
        assert one.injected >= 1 + one.combined >= 2, one
        assert (one.caught, one.missed) == (one.injected, 0), one
    assert report.false_positives == report.leaks == ()
    assert report.is_good
    assert report.checks > report.clean_checks >= SHORT.checks


def test_kinds_of_content_are_left_out_where_nothing_is_summed():
    assert set(SelfTestPlan(content=True).kinds) - set(SelfTestPlan().kinds) == {"13", "bit"}
    assert {"1", "2", "3", "4", "6", "7", "8", "9", "10", "11", "14", "early", "fork"} == set(SelfTestPlan().kinds)


def test_one_seed_gives_one_result():
    first, again, other = (self_test(SelfTestPlan(seed=seed, checks=900, single=1, combined=0)) for seed in (5, 5, 6))
    assert first.document() == again.document()
    assert first.steps != other.steps


def test_without_a_guard_the_faults_reach_a_user():
    """Each kind of those that can be waited for here spoils a token that is released."""
    kinds = ("1", "2", "3", "4", "7", "8", "10", "11", "13", "14")
    plan = SelfTestPlan(seed=1, single=5, combined=0, content=True, only=kinds)
    run = FaultRun(plan, make_guard=lambda _: NullTracker())
    with torch.inference_mode():
        run.run()
    leaked = Counter(one.kind for one in run.injections if one.leaked)
    assert leaked.keys() == set(kinds)
    assert not any(one.seen for one in run.injections)
    assert not any(world.judge.leaks for world in run.worlds.values()), "a leak that no fault explains"


@pytest.mark.parametrize("name", SMALL)
def test_traffic_meets_everything_that_an_engine_does(name):
    """Requests share a prefix, are retracted, fork, speculate, come from another engine, go to the host's memory."""
    world = World(SMALL[name], 11)
    met = Counter()
    with torch.inference_mode():
        for _ in range(90):
            world.tick()
            met.update(str(request.state.name) for request in world.decode.named.values())
            met["shared"] += any(request.num_shared for request in world.decode.running)
            met["again"] += any(request.epoch for request in world.decode.named.values())
            met["drafts"] += any(request.drafts for request in world.decode.running)
            met["pruned"] += any(request.num_pruned for request in world.decode.running)
            met["host"] += any(node.host_pages is not None for node in world.decode.tree.nodes())
        world.restart()
    wanted = {"WAITING", "ARRIVING", "PREFILL", "DECODE", "shared", "again"}
    shape = SMALL[name].decode
    wanted |= {
        word for word, has in (("drafts", shape.drafts), ("pruned", shape.window), ("host", shape.host_pages)) if has
    }
    assert wanted <= {word for word, times in met.items() if times}
    assert world.judge.false_positives == world.judge.leaks == []


def test_a_kind_that_never_happened_is_no_success(report):
    """Nor is a guard that ends whom it does not name, or lets go on whom it names."""
    silent = replace(report, kinds=(*report.kinds[1:], KindCount(kind="1")))
    assert not silent.is_good
    judge = Judge()
    judge.see("decode", Verdict(step=0, aborted=("r1",)))
    assert judge.false_positives == ["decode: r1 is ended, and no violation names it"]


def test_a_fault_counts_as_caught_only_before_its_tokens_are_released():
    seen, late, unread = Injection("4"), Injection("4"), Injection("4")
    for one in (seen, late, unread):
        one.is_fired = True
    seen.seen, late.seen, late.leaked = ["before_step"], ["after_step"], 1
    count = KindCount(kind="4")
    for one in (seen, late, unread):
        count.count(one, is_combined=False)
    assert (count.injected, count.caught, count.missed, count.harmless, count.late) == (2, 1, 1, 1, 0)
    assert count.seen_first == "before the step 1, after the step 1"


def test_a_fault_that_a_check_did_not_name_which_could_is_late():
    passed_over, behind = Injection("4"), Injection("13")
    passed_over.seen, passed_over.unsaid = ["after_step"], ["before_step"]
    behind.seen = ["before_step"]  # what a step reads by then, a checksum had to name
    for one in (passed_over, behind):
        one.is_fired = True
        count = KindCount(kind=one.kind)
        count.count(one, is_combined=False)
        assert (count.injected, count.caught, count.missed, count.late) == (1, 0, 1, 1)


def violation(check, row, index, page, request):
    words = [0] * LINE_WORDS
    of = (
        (Word.CHECK, Check[check.upper()]),
        (Word.ROW, row),
        (Word.INDEX, index),
        (Word.PAGE, page),
        (Word.OPENING, 5),
    )
    for word, value in of:
        words[word] = value
    return read_line(words, {5: request}, num_pages=99, page_size=4)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (Place("before_step", 2, 0, 7, "r2"), []),
        (Place("after_step", 2, 0, 7, "r2"), ["decode: before_step, where nothing is wrong"]),
        (Place("before_step", 2, 1, 7, "r2"), ["decode: before_step, where nothing is wrong"]),
        (Place("before_step", 3, 0, 7, "r2"), ["decode: before_step, where nothing is wrong"]),
        (Place("before_step", 2, 0, 7, "r1"), ["decode: before_step, where nothing is wrong"]),
    ],
)
def test_a_violation_is_right_only_of_a_page_that_is_wrong_for_that_row_at_that_check(wrong, complaint):
    """That a fault under way concerns the page is not enough."""
    judge, fault = Judge(), Injection("4", pages={("decode", 7)}, is_fired=True)
    judge.active = [fault]
    verdict = Verdict(step=0, violations=(violation("before_step", 2, 0, 7, "r2"),), aborted=("r2",))
    judge.see("decode", verdict, {wrong: True})
    assert [text.split(": request")[0] for text in judge.false_positives] == complaint
    assert fault.unsaid == [wrong.check] * len(complaint)
    judge.false_positives.clear()
    judge.active = []
    judge.see("decode", verdict, {wrong: True})
    assert len(judge.false_positives) == 1, "nothing was injected"
