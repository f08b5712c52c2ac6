"""What a request has computed from another's page, and given to the cache before its verdict, is nobody's."""

import pytest

from quantkit.kv_guard.engines.sglang.readers import Readers
from quantkit.kv_guard.tracker import Mode
from tests.kv_guard.engines.test_sglang_faults import OTHER, ended, row

LONG = list(range(40, 64))


@pytest.mark.parametrize("mode", [Mode.LOG, Mode.ABORT])
@pytest.mark.parametrize("chunk", [0, 1])
def test_who_reads_a_chunk_that_was_computed_from_anothers_page_is_ended(serve, chunk, mode):
    """In the second chunk of a prompt its row names another's page. The first chunk is as it was."""
    serving = serve(mode=mode, overlap=True, num_pages=40)
    other = serving.submit("other", OTHER, 8)
    serving.step(other)
    long = serving.submit("long", LONG, 2)
    serving.scheduler.chunked_req = long
    launched = serving.prefill(long, chunk=8)
    serving.checkpoint(long)
    serving.process(launched)
    row(serving, long)[:4] = row(serving, other)[4:8]
    launched = serving.prefill(long, chunk=8)
    serving.checkpoint(long)  # ahead of the verdict
    reader = serving.submit("reader", [*LONG[: 8 * (chunk + 1)], 1], 3)
    behind = serving.prefill(reader)
    serving.process(launched)
    serving.process(behind)
    serving.finish(reader)
    later = serving.submit("later", [*LONG[: 8 * (chunk + 1)], 2], 3)
    serving.finish(later)
    is_ended = chunk == 1 and mode is Mode.ABORT
    assert ended(serving) == ({"reader", "later"} if is_ended else set())


def readers():
    """Row 0 gave entry 5 before step 3 and entry 6 behind it, which row 1 reads; row 2 reads what row 1 gave."""
    made = Readers()
    for row_number, request in enumerate("abc"):
        made.open(row_number, request)
    made.step = 2
    made.give(0, [5])
    made.step = 3
    made.give(0, [6])
    made.read(1, [5, 6])
    made.give(1, [7])
    made.read(2, [7])
    return made


@pytest.mark.parametrize(
    ("request_name", "step", "entries", "others"),
    [("a", 3, {6, 7}, {"b", "c"}), ("a", 2, {5, 6, 7}, {"b", "c"}), ("b", 3, {7}, {"c"}), ("a", 4, set(), set())],
)
def test_readers_of_readers(request_name, step, entries, others):
    assert readers().behind([request_name], step) == (entries, others)


def test_a_row_that_was_closed_reads_nothing():
    made = readers()
    made.close(1)
    assert made.behind("a", 3) == ({6}, set())
    made.open(1, "d")
    assert made.behind("a", 3) == ({6}, set())
