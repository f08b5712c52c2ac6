"""What all engines make of the settings of a plugin, and what their own arrays take."""

from pathlib import Path

import torch

from quantkit.kv_guard.engines.settings import PluginSettings
from quantkit.kv_guard.engines.sglang.inbox import Inbox
from quantkit.kv_guard.engines.sglang.kept_pages import KeptPages
from quantkit.kv_guard.settings import GuardSettings, PoolSize
from quantkit.kv_guard.tracker import Mode
from tests.kv_guard.pools import IDENTITY, arrays_in

SIZE = PoolSize(num_pages=1000, page_size=4, num_rows=1, most_pages=2)


def test_a_tracker_is_told_all_that_concerns_it():
    settings = PluginSettings(mode=Mode.HALT, incidents=Path("there/i.jsonl"), ring_lines=9, secret="s" * 16)
    assert settings.of_tracker(IDENTITY, SIZE, 3, 1) == GuardSettings(
        identity=IDENTITY,
        size=SIZE,
        mode=Mode.HALT,
        ring_lines=9,
        incidents=Path("there/i.jsonl").with_name("i.rank3.group1.jsonl"),
        secret=b"s" * 16,
    )


def test_bytes_a_page_beside_a_tracker():
    """But for one entry, which takes what no page is kept for, and a number a row."""
    device = torch.device("cpu")
    for made in (KeptPages(SIZE.num_pages, device), Inbox(SIZE.num_pages, SIZE.num_rows, device)):
        num_bytes = sum(array.nbytes for array in arrays_in(vars(made).values()))
        assert 0 <= num_bytes - SIZE.num_pages * made.BYTES_A_PAGE < 64
