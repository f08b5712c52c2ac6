"""The self-test notices a guard that lacks anything: none of them passes, and the whole one does."""

import pytest

from quantkit.kv_guard.dispatch import Check
from quantkit.kv_guard.page_tags import PageTagTracker
from quantkit.kv_guard.simulation.mutants import MUTANTS, Mutant, noticed

SEED = 3


def test_each_check_has_a_guard_without_it():
    assert {check.name.lower() for check in Check} <= MUTANTS.keys()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_guard_without_it_does_not_pass(name):
    report = noticed(MUTANTS[name], SEED)
    assert all(one.injected >= MUTANTS[name].single for one in report.kinds)
    assert sum(one.missed for one in report.kinds) + len(report.false_positives) + len(report.leaks), report


def test_the_whole_guard_passes():
    kinds = tuple(dict.fromkeys(kind for mutant in MUTANTS.values() for kind in mutant.kinds))
    report = noticed(Mutant(make=PageTagTracker, kinds=kinds), SEED)
    assert report.is_good, report


def test_a_check_that_another_backs_up_is_late_when_it_is_silent():
    """Nothing is leaked, and it is noticed all the same."""
    for name in ("before_step", "grant", "release", "copied"):
        report = noticed(MUTANTS[name], SEED)
        assert sum(one.late for one in report.kinds) == sum(one.missed for one in report.kinds) > 0, name
