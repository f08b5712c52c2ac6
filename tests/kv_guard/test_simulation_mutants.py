"""The self-test notices a guard that lacks anything: none of them passes, and the whole one does."""

import pytest

from quantkit.kv_guard.dispatch import Check
from quantkit.kv_guard.page_tags import PageTagTracker
from quantkit.kv_guard.simulation.mutants import MUTANTS, Mutant, noticed

SEED = 3
NOT_INJECTED = {"announcement", "opening"}  # what the simulated engine never does wrong: unit tests alone
BACKED_UP = {"before_step", "grant", "release", "copied"}  # by another check: silence is late, and nothing is leaked


def test_each_check_has_a_guard_without_it():
    assert {check.name.lower() for check in Check} <= MUTANTS.keys() | NOT_INJECTED


@pytest.mark.parametrize("name", MUTANTS)
def test_a_guard_without_it_does_not_pass(name):
    report = noticed(MUTANTS[name], SEED)
    assert all(one.injected >= MUTANTS[name].single for one in report.kinds)
    missed = sum(one.missed for one in report.kinds)
    assert missed + len(report.false_positives) + len(report.leaks), report
    if name in BACKED_UP:
        assert sum(one.late for one in report.kinds) == missed > 0


def test_the_whole_guard_passes():
    kinds = tuple(dict.fromkeys(kind for mutant in MUTANTS.values() for kind in mutant.kinds))
    report = noticed(Mutant(make=PageTagTracker, kinds=kinds), SEED)
    assert report.is_good, report
