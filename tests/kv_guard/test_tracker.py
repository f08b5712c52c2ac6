"""What an engine may call a tracker, and the one that does nothing."""

import inspect
import re
from pathlib import Path

import pytest

from quantkit.kv_guard import engines
from quantkit.kv_guard.page_tags import PageTagTracker, new_tracker
from quantkit.kv_guard.settings import GuardSettings, PoolSize
from quantkit.kv_guard.tracker import Mode, NullTracker, Tracker
from tests.kv_guard.pools import IDENTITY, arrays_in

SIZE = PoolSize(num_pages=4, page_size=4, num_rows=2, most_pages=2)
CALLS = [name for name, _ in inspect.getmembers(Tracker, inspect.isfunction) if not name.startswith("_")]


def test_a_tracker_is_what_the_settings_say():
    """That both are trackers is checked with the types."""
    settings = GuardSettings(identity=IDENTITY, size=SIZE)
    off = GuardSettings(identity=IDENTITY, size=SIZE, mode=Mode.OFF)
    assert [type(new_tracker(one)) for one in (None, off, settings)] == [NullTracker, NullTracker, PageTagTracker]
    assert [new_tracker(one).is_on for one in (None, settings)] == [False, True]


@pytest.mark.parametrize("size", [SIZE, PoolSize(num_pages=17, page_size=4, num_rows=5, most_pages=3)])
def test_the_bytes_of_a_pool_are_those_of_its_arrays(size):
    tracker = PageTagTracker(GuardSettings(identity=IDENTITY, size=size))
    ring = sum(array.nbytes for array in arrays_in([tracker._arrays.ring]))
    assert size.num_bytes == sum(array.nbytes for array in arrays_in(vars(tracker).values())) - ring


@pytest.mark.parametrize("name", CALLS)
def test_what_is_off_is_never_asked_for_more(name):
    with pytest.raises(AssertionError, match="ask for is_on first"):
        getattr(new_tracker(None), name)()


@pytest.mark.parametrize("name", ["chains", "metrics"])
def test_nor_for_what_it_has(name):
    with pytest.raises(AssertionError, match="ask for is_on first"):
        getattr(new_tracker(None), name)


def test_the_plugins_call_what_the_protocol_says_that_they_do():
    sources = "".join(path.read_text() for path in Path(engines.__file__).parent.rglob("*.py"))
    left = {name for name in vars(Tracker) if not name.startswith("_")} - {"is_on"}
    called = {name for name in left if re.search(rf"tracker\.{name}\b", sources)}
    said = set(re.findall(r"`(\w+)`", Tracker.__doc__.split("The plugins call no ")[1].split("They")[0]))
    assert left - called == said
