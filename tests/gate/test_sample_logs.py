"""Reading and pairing sample logs: what the harness writes, plain lines, and everything that may be wrong."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import SourceError, UsageError
from quantkit.gate.gate import Criterion, Verdict, check_criterion, judge
from quantkit.gate.pairs import pair_logs
from quantkit.gate.sample_log import MOST_LINE_BYTES, read_log
from tests.gate.helpers import flipped, harness_line, harness_log, plain_log, write_lines


def compared(baseline, candidate, max_drop=1.0, criterion=None, **options):
    pairing = pair_logs(read_log(baseline), read_log(candidate), **options)
    return judge(pairing, criterion or Criterion(max_drop=max_drop))


def names(report):
    return [(one.pairs.task, one.pairs.filter, one.pairs.metric) for one in report.tasks]


def test_a_run_of_several_tasks_in_the_folder_of_a_model(tmp_path):
    for side, which in (("a", 0), ("b", 1)):
        harness_log(tmp_path / side, "arc_challenge", flipped(200, 6, 3)[which], metric="acc_norm")
        harness_log(tmp_path / side, "mmlu_high_school_2026-x", flipped(100, 2, 2)[which])
        (tmp_path / side / "org__model" / "results_2026-05-01T10-20-30.123456.json").write_text("{}")
    report = compared(tmp_path / "a", tmp_path / "b")
    assert names(report) == [("arc_challenge", "none", "acc_norm"), ("mmlu_high_school_2026-x", "none", "acc")]
    arc = report.tasks[0].comparison
    assert (arc.num_questions, arc.num_lost, arc.num_gained) == (200, 6, 3)
    assert (arc.baseline, arc.candidate, arc.change) == (98.5, 97.0, -1.5)
    assert arc.mcnemar_p == pytest.approx(0.5078125)
    assert report.overall.num_questions == 300
    assert report.overall.change == pytest.approx(-0.75)
    pooled = compared(tmp_path / "a", tmp_path / "b", criterion=Criterion(max_drop=1, is_pooled=True)).overall
    assert pooled.change == pytest.approx(-1.0)


def test_a_file_is_a_run_of_one_task(tmp_path):
    one = harness_log(tmp_path / "a", "gsm8k", [1, 0, 1], metric="exact_match")
    assert names(compared(one, tmp_path / "a")) == [("gsm8k", "none", "exact_match")]


@pytest.mark.parametrize("scores", [[1, 0, 1], [True, False, True], [1.0, 0.0, 1.0], ["True", "False", "True"]])
def test_every_spelling_of_right_and_wrong(scores, tmp_path):
    comparison = compared(plain_log(tmp_path / "a.jsonl", scores), plain_log(tmp_path / "b.jsonl", [0, 1, 1])).overall
    assert (comparison.num_lost, comparison.num_gained) == (1, 1)


def test_plain_lines_pair_whatever_their_files_are_called(tmp_path):
    before, after = plain_log(tmp_path / "fp8.jsonl", [1, 1]), plain_log(tmp_path / "int4.jsonl", [1, 0])
    assert names(compared(before, after)) == [("all", "none", "correct")]
    before = plain_log(tmp_path / "x" / "fp8.jsonl", [1, 1], task="bfcl")
    after = plain_log(tmp_path / "y" / "int4.jsonl", [1, 0], task="bfcl")
    assert names(compared(tmp_path / "x", tmp_path / "y")) == [("bfcl", "none", "correct")]
    mark = "\ufeff".encode()
    after.write_bytes(mark + after.read_bytes().replace(b'"id": 0', b'"id": "0"') + b"\r\n\n")
    assert compared(before, after).overall.num_questions == 2


def two_filters(path, strict, flexible):
    lines = []
    for index, scores in enumerate(zip(strict, flexible, strict=True)):
        for name, score in zip(("strict-match", "flexible-extract"), scores, strict=True):
            lines.append(harness_line(index, {"exact_match": score}, filter=name))
    return write_lines(path, lines)


def test_a_question_under_two_filters_counts_once(tmp_path):
    before = two_filters(tmp_path / "samples_gsm8k.jsonl", [1] * 100, [1] * 100)
    after = two_filters(tmp_path / "b" / "samples_gsm8k.jsonl", [0] * 4 + [1] * 96, [0] * 2 + [1] * 98)
    report = compared(before, after)
    assert [one.pairs.name for one in report.tasks] == ["gsm8k/flexible-extract", "gsm8k/strict-match"]
    assert report.overall.num_questions == 100
    assert report.overall.change == pytest.approx(-3.0)
    assert report.overall.num_lost == 4
    assert report.overall.mcnemar_p is None  # halves
    strict = compared(before, after, tasks=["gsm8k/strict-match"])
    assert strict.overall.change == -4.0
    doubled = two_filters(tmp_path / "c" / "samples_gsm8k.jsonl", [0] * 4 + [1] * 96, [0] * 4 + [1] * 96)
    twice = compared(before, doubled).overall
    assert (twice.low, twice.high) == (strict.overall.low, strict.overall.high)  # two filters are no more questions


def test_tasks_are_chosen_by_name_or_pattern(tmp_path):
    for side in ("a", "b"):
        for task in ("mmlu_law", "mmlu_virology", "gsm8k"):
            harness_log(tmp_path / side, task, [1, 0])
    report = compared(tmp_path / "a", tmp_path / "b", tasks=["mmlu_*"])
    assert [one.pairs.task for one in report.tasks] == ["mmlu_law", "mmlu_virology"]
    with pytest.raises(UsageError, match="--task arc is in neither log; there are: gsm8k, mmlu_law, mmlu_virology"):
        compared(tmp_path / "a", tmp_path / "b", tasks=["arc"])


def test_the_metric_is_the_one_that_is_wanted_or_the_usual_one(tmp_path):
    lines = [harness_line(index, {"acc": 1, "acc_norm": 0, "f1": 0.5, "ppl": 3.2, "many": [1]}) for index in range(3)]
    path = write_lines(tmp_path / "samples_x.jsonl", lines)
    assert names(compared(path, path))[0][2] == "acc_norm"
    assert names(compared(path, path, metrics=["nosuch", "f1", "acc"]))[0][2] == "f1"
    assert compared(path, path, metrics=["f1"]).overall.mcnemar_p is None
    for metric, words in (("ppl", "ppl is 3.2, neither"), ("many", r"many is \[1\], neither")):
        with pytest.raises(SourceError, match=words):
            compared(path, path, metrics=[metric])
    with pytest.raises(SourceError, match="none of the metrics bleu"):
        compared(path, path, metrics=["bleu"])
    lower = write_lines(tmp_path / "samples_y.jsonl", [harness_line(0, {"brier_score": 0.2})])
    with pytest.raises(SourceError, match="of which more is better; there are: brier_score"):
        compared(lower, lower)


GOOD = b'{"id": 0, "correct": 1}\n'


@pytest.mark.parametrize(
    ("raw", "line", "words"),
    [
        (b"", None, "is empty"),
        (b"\n \n", None, "is empty"),
        (GOOD + b"{", 2, "is not JSON"),
        (GOOD + b"\x00\xff", 2, "is not JSON"),
        (GOOD + b"[1]", 2, "not a JSON object"),
        (GOOD + b"[" * 100_000, 2, "is not JSON"),
        (GOOD + b'{"id": 1, "correct": 1, "correct": 0}', 2, "a key stands twice"),
        (GOOD + b'{"id": "\\ud800", "correct": 1}', 2, "is not JSON"),
        (GOOD + b'{"correct": 1}', 2, "has no id"),
        (GOOD + b'{"id": null, "correct": 1}', 2, "has no id"),
        (GOOD + b'{"id": true, "correct": 1}', 2, "has no id"),
        (GOOD + b'{"id": "", "correct": 1}', 2, "has no id"),
        (GOOD + b'{"id": 1.5, "correct": 1}', 2, "has no id"),
        (GOOD + b'{"id": 1, "task": 3, "correct": 1}', 2, "task or filter is no text"),
        (GOOD + b'{"id": 1, "filter": [], "correct": 1}', 2, "task or filter is no text"),
        (GOOD + b'{"id": "0", "correct": 0}', 2, "id 0 of task all, filter none stands in"),
        (GOOD + b'{"id": 1}', 2, "there is no metric correct"),
        (GOOD + b'{"id": 1, "correct": 2}', 2, "neither 0 or 1"),
        (GOOD + b'{"id": 1, "correct": -0.1}', 2, "neither 0 or 1"),
        (GOOD + b'{"id": 1, "correct": NaN}', 2, "neither 0 or 1"),
        (GOOD + b'{"id": 1, "correct": 1e999}', 2, "neither 0 or 1"),
        (GOOD + b'{"id": 1, "correct": "yes"}', 2, "neither 0 or 1"),
        (GOOD + b'{"id": 1, "correct": null}', 2, "neither 0 or 1"),
        (GOOD + b'{"id": 1, "correct": ' + b"9" * 5000 + b"}", 2, "is not JSON"),
    ],
)
def test_a_bad_line_is_named(raw, line, words, tmp_path):
    bad, good = tmp_path / "bad.jsonl", tmp_path / "good.jsonl"
    bad.write_bytes(raw)
    good.write_bytes(b'{"id": 0, "correct": 1}\n{"id": 1, "correct": 1}\n')
    for pair in ((bad, good), (good, bad), (bad, bad)):
        with pytest.raises(SourceError, match=words) as caught:
            compared(*pair)
        assert caught.value.file == (f"{bad}:{line}" if line else str(bad))
        assert caught.value.remedy


def test_lines_without_end_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("quantkit.gate.sample_log.MOST_LINE_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b'{"id": 1, "correct": 1, "x": "' + b"y" * 1000)
    with pytest.raises(SourceError, match="is longer than"):
        read_log(path)
    assert MOST_LINE_BYTES >= 1 << 20


def test_what_is_no_log(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "dir" / "x.jsonl").mkdir(parents=True)
    os.mkfifo(tmp_path / "fifo.jsonl")
    for name in ("nosuch", "empty", "dir", "fifo.jsonl", "x" * 300):
        with pytest.raises(SourceError):
            read_log(tmp_path / name)


def test_two_runs_in_one_folder_are_not_mixed(tmp_path):
    first = harness_log(tmp_path, "gsm8k", [1, 0])
    first.with_name("samples_gsm8k_2026-06-01T10-20-30.123456.jsonl").write_bytes(first.read_bytes())
    with pytest.raises(SourceError, match=r"id 0 of task gsm8k, filter none stands in .*2026-05-01.*:1, too"):
        read_log(tmp_path)


def test_ids_of_one_side_are_counted_or_left_out_aloud(tmp_path):
    before, after = plain_log(tmp_path / "a.jsonl", [1] * 10), plain_log(tmp_path / "b.jsonl", [1] * 7)
    with pytest.raises(SourceError, match=r"3 samples have no pair: 3 are in .*a\.jsonl alone, 0 in .*b\.jsonl alone"):
        compared(before, after)
    report = compared(before, after, allow_unpaired=True)
    assert (report.overall.num_questions, report.num_unpaired) == (7, 3)
    assert "3 samples of all" in report.warnings[0]
    other = plain_log(tmp_path / "c.jsonl", [1] * 7, task="other")
    with pytest.raises(SourceError, match=r"17 samples have no pair.* \(tasks of the one: all; of the other: other\)"):
        compared(before, other)
    with pytest.raises(SourceError, match="no question is in both"):
        compared(before, other, allow_unpaired=True)


@pytest.mark.parametrize("field", ["doc_hash", "target_hash"])
def test_another_document_under_the_same_id_is_refused(field, tmp_path):
    lines = [harness_line(index, {"acc": 1}) for index in range(3)]
    before = write_lines(tmp_path / "a" / "samples_x.jsonl", lines)
    lines[1] = {**lines[1], field: "other"}
    after = write_lines(tmp_path / "b" / "samples_x.jsonl", lines)
    with pytest.raises(SourceError, match=r"id 1 of x is another document in .* as are 1 of 3") as caught:
        compared(before, after)
    assert caught.value.file == f"{before}:2"


def test_documents_without_hashes_are_compared_themselves(tmp_path):
    lines = [{"doc_id": index, "doc": {"a": index, "b": 1}, "acc": 1} for index in range(2)]
    before = write_lines(tmp_path / "samples_x.jsonl", lines)
    turned = [{**line, "doc": dict(reversed(line["doc"].items()))} for line in lines]
    assert compared(before, write_lines(tmp_path / "b" / "samples_x.jsonl", turned)).passes is False
    turned[0]["doc"]["a"] = 9
    with pytest.raises(SourceError, match="another document"):
        compared(before, write_lines(tmp_path / "b" / "samples_x.jsonl", turned))


def test_other_prompts_are_said(tmp_path):
    before = harness_log(tmp_path / "a", "x", [1, 1])
    after = harness_log(tmp_path / "b", "x", [1, 1], prompt_hash="other")
    assert "2 pairs had different prompts" in compared(before, after).warnings[0]


LINES = st.lists(st.tuples(st.sampled_from([0, 1]), st.sampled_from([0, 1])), min_size=1, max_size=30)


@given(LINES, LINES, st.randoms(use_true_random=False))
def test_order_of_lines_changes_nothing_and_exchanged_sides_mirror(tmp_path_factory, first, second, random):
    folder = tmp_path_factory.mktemp("logs")
    lines = [
        [
            {"id": index, "task": task, "correct": pair[side]}
            for task, pairs in (("x", first), ("y", second))
            for index, pair in enumerate(pairs)
        ]
        for side in (0, 1)
    ]
    before, after = (write_lines(folder / f"{side}.jsonl", lines[side]) for side in (0, 1))
    report, mirrored = compared(before, after), compared(after, before)
    for side, path in enumerate((before, after)):
        write_lines(path, random.sample(lines[side], len(lines[side])))
    shuffled = compared(before, after)
    assert shuffled.overall == report.overall
    for one, other in [
        (report.overall, mirrored.overall),
        *((a.comparison, b.comparison) for a, b in zip(report.tasks, mirrored.tasks, strict=True)),
    ]:
        assert (one.low, one.high) == (-other.high, -other.low)
        assert (one.baseline, one.candidate, one.change) == (other.candidate, other.baseline, -other.change)
        assert (one.num_lost, one.num_gained) == (other.num_gained, other.num_lost)
        assert one.mcnemar_p == other.mcnemar_p
        assert one.needed.even_chance == other.needed.even_chance


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["id", "doc_id", "correct", "acc", "task", "filter", "doc", "doc_hash", "x"]), inner, max_size=5
    ),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_whatever_a_log_holds_there_is_a_report_or_a_named_error(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("log") / "a.jsonl"
    path.write_bytes(raw)
    try:
        report, refusal = compared(path, path), None
    except SourceError as error:
        report, refusal = None, error
    assert (report is None) == (refusal is not None)
    assert refusal is None or str(path) in str(refusal)
    assert report is None or report.overall.change == 0


@pytest.mark.parametrize(
    ("counts", "criterion", "verdict"),
    [
        ((14042, 281, 281), {}, Verdict.WITHIN),  # MMLU, 4 % flips, nothing lost
        ((14042, 316, 246), {}, Verdict.WITHIN),  # 0.50 lost
        ((14042, 330, 232), {}, Verdict.NOT_SHOWN),  # 0.70 lost
        ((14042, 420, 142), {}, Verdict.EXCEEDED),  # 1.98 lost
        ((1319, 26, 26), {}, Verdict.NOT_SHOWN),  # GSM8K, nothing lost
        ((1319, 26, 26), {"is_point": True}, Verdict.WITHIN),
        ((1000, 8, 0), {"is_point": True}, Verdict.WITHIN),  # 0.8 is within 0.8
        ((1000, 9, 0), {"is_point": True}, Verdict.EXCEEDED),
        ((10, 0, 0), {}, Verdict.NOT_SHOWN),
        ((14042, 330, 232), {"confidence": 0.7}, Verdict.WITHIN),
    ],
)
def test_verdicts(counts, criterion, verdict, tmp_path):
    before, after = flipped(*counts)
    paths = plain_log(tmp_path / "a.jsonl", before), plain_log(tmp_path / "b.jsonl", after)
    report = compared(*paths, criterion=Criterion(max_drop=0.8, **criterion))
    assert report.overall.verdict is verdict
    assert report.passes == (verdict is Verdict.WITHIN)


def test_each_task_or_the_mean(tmp_path):
    for side in (0, 1):
        for task, counts in (("big", (14042, 281, 281)), ("small", (1319, 26, 26))):
            harness_log(tmp_path / str(side), task, flipped(*counts)[side])
    paths = tmp_path / "0", tmp_path / "1"
    assert compared(*paths, criterion=Criterion(max_drop=0.8)).passes
    assert not compared(*paths, criterion=Criterion(max_drop=0.8, is_per_task=True)).passes


def test_criteria_that_make_no_sense():
    for wrong in (
        {"max_drop": -0.1},
        {"max_drop": 100},
        {"max_drop": float("nan")},
        {"max_drop": 1, "confidence": 95},
        {"max_drop": 1, "confidence": 0.5},
        {"max_drop": 1, "confidence": float("nan")},
        {"max_drop": 1, "is_per_task": True, "is_pooled": True},
    ):
        with pytest.raises(UsageError):
            check_criterion(Criterion(**wrong))


@pytest.mark.parametrize("max_drop", [0.0, 1e-200, 1e-4, 99.9])
def test_any_drop_can_be_asked_for(max_drop, tmp_path):
    before, after = flipped(100, 3, 1)
    report = compared(
        plain_log(tmp_path / "a.jsonl", before), plain_log(tmp_path / "b.jsonl", after), max_drop=max_drop
    )
    assert (report.overall.needed.even_chance is None) == (max_drop < 1e-4)
    assert report.passes == (max_drop > 50)
