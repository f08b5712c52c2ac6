"""What a logbook keeps of what a tracker finds, whichever engine it is in: log, metrics, the pool to inspect."""

import logging
import re
from contextlib import nullcontext

import pytest
import torch

from quantkit.kv_guard.dump_reader import read_dump
from quantkit.kv_guard.dump_report import check_dump
from quantkit.kv_guard.engines.logbook import Logbook
from quantkit.kv_guard.engines.settings import PluginSettings
from quantkit.kv_guard.tracker import KvGuardError, Mode, Step
from tests.kv_guard.pools import PAGE_SIZE, Pool, numbers

LOG = logging.getLogger("tests.logbook")
METRICS, DUMP = "m.rank3.group1.prom", "pool.rank3.group1.safetensors"


@pytest.fixture
def keep(tmp_path):
    """Makes a pool of two requests and its logbook, which writes two files."""

    def keep(mode=Mode.ABORT, lock=None, dump=tmp_path / "pool.safetensors", **settings):
        pool = Pool(mode=mode, **settings)
        pool.begin(0, range(10), [3, 4, 5], request="alpha")
        pool.begin(2, range(50, 60), [6, 9, 7], request="beta")
        told = PluginSettings(mode=mode, metrics=tmp_path / "m.prom", dump=dump)
        return pool, Logbook(pool.tracker, told, LOG, (3, 1), lock)

    return keep


def run(pool, logbook, step=None):
    number = logbook.before_step(step or pool.step(0, 2))
    pool.tracker.after_step()
    return logbook.verdict(number)


def sample(path, name):
    """The sum of its lines."""
    lines = re.findall(rf"^quantkit_kv_guard_{name}\{{.*\}} (\d+)$", path.read_text(), re.M)
    assert lines
    return sum(map(int, lines))


def test_the_start_and_the_end_are_said(keep, tmp_path, caplog):
    """An engine that passes a plugin over says nothing of it."""
    caplog.set_level(logging.INFO)
    pool, logbook = keep()
    assert caplog.messages == ["KV guard: on, mode abort, rank 3, group 1, 16 pages"]
    assert sample(tmp_path / METRICS, "attached") == 1
    assert run(pool, logbook).violations == ()
    logbook.detach()
    assert sample(tmp_path / METRICS, "attached") == 0
    assert 'checks_total{pool="target",rank="3"} 1' in (tmp_path / METRICS).read_text()


def test_metrics_are_written_seldom_where_nothing_is_found(keep, tmp_path):
    pool, logbook = keep()
    for _ in range(5):
        run(pool, logbook)
    assert sample(tmp_path / METRICS, "checks_total") == 1
    assert not (tmp_path / DUMP).exists()


@pytest.mark.parametrize("mode", [Mode.LOG, Mode.ABORT, Mode.HALT])
def test_what_was_found_is_written_at_once(keep, tmp_path, mode):
    """Also before a halt ends the server; it may have nothing to do for hours behind it."""
    pool, logbook = keep(mode)
    run(pool, logbook)
    pool.tracker.release(numbers(4))
    with pytest.raises(KvGuardError, match="request alpha") if mode is Mode.HALT else nullcontext():
        run(pool, logbook)
    assert sample(tmp_path / METRICS, "checks_total") == 2
    assert sample(tmp_path / METRICS, "violations_total") == 2
    assert sample(tmp_path / METRICS, "aborted_requests_total") == (mode is Mode.ABORT)
    dump = read_dump(tmp_path / DUMP)
    assert dict(dump.names) == {0: "alpha", 2: "beta"}
    (violation,) = check_dump(dump).violations
    assert (violation.request, violation.evidence.page) == ("alpha", 4)


def test_the_first_violation_alone_is_dumped_and_under_the_lock(keep, tmp_path):
    there = []

    class Lock:
        """Notes which files there are when it is taken, and when it is given back."""

        def __enter__(self):
            there.append({path.name for path in tmp_path.iterdir()})

        def __exit__(self, *_):
            self.__enter__()

    pool, logbook = keep(lock=Lock())
    pool.tracker.release(numbers(4))
    for _ in range(2):
        assert run(pool, logbook).violations
    assert there == [{METRICS}, {METRICS, DUMP}]


def test_of_a_table_of_tokens_what_the_step_may_read_is_dumped(keep, tmp_path):
    pool, logbook = keep()
    table = torch.zeros(4, 1000, dtype=torch.int32)
    table[0, :12] = torch.cat([torch.arange(page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in (3, 4, 9)])
    step = Step(table=table, rows=numbers(0), lengths=numbers(10), most_pages=3, by_token=True)
    assert run(pool, logbook, step).aborted == ("alpha",)
    dump = read_dump(tmp_path / DUMP)
    assert dump.step.table.shape == (4, 12)
    assert [one.evidence.page for one in check_dump(dump).violations] == [9]


def test_the_log_says_how_many_it_leaves_out(keep, caplog):
    pool, logbook = keep(ring_lines=9)
    pool.tracker.release(numbers(3, 4, 5, 6, 9, 7))
    assert run(pool, logbook).lost == 3
    lines = [line for line in caplog.messages if line.startswith("KV guard, step 0, group 1: ")]
    assert sum("physical page" in line for line in lines) == 8
    assert lines[8:] == [
        "KV guard, step 0, group 1: 1 more violations",
        "KV guard, step 0, group 1: 3 more violations had no room in the ring",
    ]


def test_files_that_cannot_be_written_end_no_server(keep, tmp_path, caplog):
    """It is said; a dump is not tried again."""
    (tmp_path / f"{METRICS}.partial").mkdir()
    pool, logbook = keep(dump=tmp_path / "gone" / "pool.safetensors")
    pool.tracker.release(numbers(4))
    for _ in range(2):
        assert run(pool, logbook).aborted == ("alpha",)
    assert "metrics were not written" in caplog.text
    assert caplog.text.count("the pool was not dumped to") == 1
