"""Evidence in files and counters: whole, readable by the next tool, and without a user's tokens."""

import json
import re

import pytest

from quantkit.errors import SourceError
from quantkit.kv_guard.dispatch import Check
from quantkit.kv_guard.explain import explanation, found_faults
from quantkit.kv_guard.faults import MEANING, MOMENTS, Fault, in_words
from quantkit.kv_guard.incidents import read_incidents
from quantkit.kv_guard.metrics import FAMILIES
from tests.kv_guard.pools import Pool, numbers


@pytest.fixture
def incidents(tmp_path):
    path = tmp_path / "incidents.jsonl"
    pool = Pool(incidents=path, first_generation=7)
    pool.begin(0, range(1000, 1010), [3, 4, 5], request="alpha")
    assert pool.run(0).violations == ()
    assert not path.exists()
    pool.tracker.release(numbers(4))
    pool.run(0)
    return path


def test_a_line_holds_what_was_expected_and_found(incidents):
    first, second = read_incidents(incidents)
    assert (first["check"], second["check"]) == ("before_step", "after_step")
    assert first["pool"] == {"model": "tiny", "layout": "mla-656, pages of 4", "pool": "target"}
    assert {name: first[name] for name in ("step", "fault", "request", "row", "index", "page")} == {
        "step": 1,
        "fault": "freed",
        "request": "alpha",
        "row": 0,
        "index": 1,
        "page": 4,
    }
    assert first["expected"]["generation"] == f"{7 + 16 + 1:016x}"  # sixteen pages were sealed as free before
    assert first["found"] == {"generation": f"{7 + 16 + 3:016x}", "owner": "0" * 16, "index": None, "checksum": 0}


def test_no_token_is_written_down(incidents):
    text = json.dumps([{**one, "time": None} for one in read_incidents(incidents)])
    assert not [token for token in range(1000, 1010) if str(token) in text]


def test_a_sentence_says_it(incidents):
    text = explanation(read_incidents(incidents)[0])
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ, ", text)
    rest = ", before step 1, request alpha: logical page 1, page 4: the page was released while the row still"
    assert text[20:].startswith(rest)
    assert text.endswith("found generation 000000000000001a, free")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: "", "holds no incident"),
        (lambda text: text[:-20], "line 2 is no JSON"),
        (lambda text: "[]\n" + text, "is no incident file"),
        (lambda text: text + "[]\n", "is no incident"),
        (lambda text: text.replace('"version": 1', '"version": 9'), "line 1 is of version 9, this is 1"),
        (lambda text: text.replace('"freed"', '"eaten"'), "line 1 has a fault or a check that this version does not"),
        (lambda text: text.replace('"before_step"', '"soon"'), "line 1 has a fault or a check that this version does"),
        (lambda text: text.replace('"time": "2', '"time": "x'), "line 1 is no incident"),
        (lambda text: text.replace('"found": {"generation"', '"found": {"x"'), "line 1 is no incident"),
        (lambda text: text.replace('"page": 4', '"page": "4"'), "line 1 is no incident"),
    ],
)
def test_a_changed_file_is_refused(change, words, incidents):
    incidents.write_text(change(incidents.read_text()))
    with pytest.raises(SourceError) as caught:
        read_incidents(incidents)
    assert words in str(caught.value)


def test_every_fault_has_a_meaning_and_a_sample():
    assert set(MEANING) == set(Fault)
    pool = Pool()
    text = pool.tracker.metrics.text()
    for fault in Fault:
        assert f'quantkit_kv_guard_violations_total{{pool="target",fault="{fault}"}} 0\n' in text


def test_every_check_has_a_moment():
    assert set(MOMENTS) == {check.name.lower() for check in Check}


def test_counters_are_those_of_the_steps():
    pool = Pool()
    pool.begin(0, range(10), [3, 4, 5])
    pool.run(0)
    pool.tracker.release(numbers(4))
    pool.run(0)
    lines = pool.tracker.metrics.text().splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert samples['quantkit_kv_guard_checks_total{pool="target"}'] == "2"
    assert samples['quantkit_kv_guard_pages_total{pool="target"}'] == "12"
    assert samples['quantkit_kv_guard_violations_total{pool="target",fault="freed"}'] == "2"
    assert samples['quantkit_kv_guard_aborted_requests_total{pool="target"}'] == "1"
    assert int(samples['quantkit_kv_guard_microseconds_total{pool="target"}']) > 0
    assert [line.split()[2] for line in lines if line.startswith("# TYPE")] == list(FAMILIES)


def test_a_file_that_cannot_be_written_ends_no_server(tmp_path, caplog):
    """A full disk, a folder that is gone: it is said and counted, and the request is aborted all the same."""
    pool = Pool(incidents=tmp_path / "gone" / "incidents.jsonl")
    pool.begin(0, range(10), [3, 4, 5], request="alpha")
    pool.tracker.release(numbers(4))
    assert pool.run(0).aborted == ("alpha",)
    assert "2 incidents are not written down" in caplog.text
    assert 'quantkit_kv_guard_incidents_unwritten_total{pool="target"} 2' in pool.tracker.metrics.text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda line: '{"step": ' + "[" * 100_000, "line 1 is no JSON"),
        (lambda line: line.replace('"step": 1', '"step": NaN'), "line 1 is no JSON: NaN is no number"),
        (lambda line: line.replace('"version": 1', '"version": true'), "line 1 is no incident"),
        (lambda line: line.replace('"index": 1', '"index": true', 1), "line 1 is no incident"),
    ],
)
def test_a_line_that_nobody_wrote_is_refused(change, words, incidents):
    text = incidents.read_text()
    incidents.write_text(change(text))
    assert incidents.read_text() != text
    with pytest.raises(SourceError, match=words):
        read_incidents(incidents)


NAME = "a\nstep 9, request innocent\x1b[2K"


def test_a_line_and_a_sentence_say_it_of_whom_and_where(incidents):
    first, _ = read_incidents(incidents)
    nobody = first | {"request": None, "index": None, "expected": None}
    assert ", no request: page 4: the page was released while the row still had it; expected nothing, found " in (
        explanation(nobody)
    )
    assert explanation(nobody | {"fault": "row_taken"}).endswith(f", no request: row 0: {MEANING[Fault.ROW_TAKEN]}")
    said = [in_words(fault, None, 7, "physical page 4") for fault in (Fault.FREED, Fault.ROW_TAKEN)]
    assert said == [
        f"no request, physical page 4: {MEANING[Fault.FREED]}",
        f"no request, row 7: {MEANING[Fault.ROW_TAKEN]}",
    ]


def test_a_request_by_any_name_is_one_line(incidents):
    first, _ = read_incidents(incidents)
    assert r"request a\nstep 9, request innocent\u001b[2K: " in explanation(first | {"request": NAME})
    assert explanation(first | {"request": NAME}).isprintable()


def test_a_request_by_any_name_forges_no_line_of_a_log():
    pool = Pool()
    pool.begin(0, range(10), [3, 4, 5], request=NAME)
    pool.tracker.release(numbers(4))
    verdict = pool.run(0)
    assert verdict.aborted == (NAME,)
    for violation in verdict.violations:
        assert violation.text.isprintable()
        assert violation.text.startswith(r"request a\nstep 9, request innocent\u001b[2K, physical page 4: ")


def test_a_fault_is_one_in_each_step(incidents):
    """Seen before and after a step it is two lines; another step's, and one that was seen once, stay their own."""
    first, second = read_incidents(incidents)
    lines = [first, second, first | {"step": 2}, second | {"step": 3}, first | {"check": "grant"}, first, second]
    found = [one.text.split(", ", 1)[1].split(", request")[0] for one in found_faults(lines)]
    wanted = ["before and after step 1", "before step 2", "after step 3", "step 1, at the grant"]
    assert found == [*wanted, "before and after step 1"]


def test_a_guard_that_found_nothing_has_written_no_file(tmp_path):
    with pytest.raises(SourceError, match="one that has found nothing has written no file"):
        read_incidents(tmp_path / "incidents.jsonl")
