"""What the guard tells Prometheus: every line is one of its text format, whatever a label holds."""

import re

import pytest

from quantkit.kv_guard.faults import Fault
from quantkit.kv_guard.identity import PoolIdentity
from quantkit.kv_guard.metrics import FAMILIES, Metrics

LABEL = r'([a-z]+)="((?:[^"\\\n]|\\[\\"n])*)"'
SAMPLE = re.compile(rf"(\w+)\{{({LABEL}(?:,{LABEL})*)\}} (\d+)")
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def samples_of(text):
    """By name, in the order of the text; fails for a line that no parser would take, or a family told in two places."""
    assert text.endswith("\n")
    found, kinds = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            kinds[name] = kind
        elif not re.fullmatch(r"# HELP \w+ [^\\\n]+", line):
            sample = SAMPLE.fullmatch(line)
            assert sample, line
            assert sample[1] == next(reversed(kinds)), line
            labels = {
                name: re.sub(r"\\.", lambda one: ESCAPES[one[0]], value) for name, value in re.findall(LABEL, sample[2])
            }
            found.setdefault(sample[1], []).append((labels, int(line.rsplit(" ", 1)[1])))
    assert {name: "counter" if name.endswith("_total") else "gauge" for name in FAMILIES} == kinds
    assert list(found) == list(FAMILIES)
    return found


@pytest.mark.parametrize("model", ["tiny", 'a "b" \\ c\n\\n'])
def test_the_text(model):
    metrics = Metrics(PoolIdentity(model=model, layout="x, {y}", pool="group1"))
    metrics.unwritten = 3
    found = samples_of(metrics.text(rank=5))
    place = {"pool": "group1", "rank": "5"}
    assert found["quantkit_kv_guard_attached"] == [(place | {"model": model, "layout": "x, {y}"}, 1)]
    assert found["quantkit_kv_guard_incidents_unwritten_total"] == [(place, 3)]
    assert [labels for labels, _ in found["quantkit_kv_guard_violations_total"]] == [
        place | {"fault": str(fault)} for fault in Fault
    ]


def test_a_guard_that_is_off_says_so():
    found = samples_of(Metrics(PoolIdentity(model="m", layout="l")).text(is_attached=False))
    assert [value for _, value in found["quantkit_kv_guard_attached"]] == [0]
