"""What all engines make of the settings of a plugin, and what their own arrays take."""

import json
from pathlib import Path

import pytest
import torch

from quantkit.kv_guard.engines.settings import PluginSettings, path_of, read_settings
from quantkit.kv_guard.engines.sglang.inbox import Inbox
from quantkit.kv_guard.engines.sglang.kept_pages import KeptPages
from quantkit.kv_guard.settings import GuardSettings, PoolSize
from quantkit.kv_guard.tracker import KvGuardError, Mode
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


def test_a_file_is_one_trackers():
    """Of each rank and group of layers, under one rule for both engines."""
    assert str(path_of(Path("there/i.jsonl"), 3, 1)) == "there/i.rank3.group1.jsonl"
    assert path_of(None, 3) is None


def test_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_settings({}).mode is Mode.OFF
    assert read_settings({"QUANTKIT_KV_GUARD": "abort"}) == PluginSettings(mode=Mode.ABORT)
    path = tmp_path / "guard.json"
    path.write_text(json.dumps({"mode": "halt", "incidents": "x.jsonl", "ring_lines": 8, "model": None}))
    settings = read_settings({"QUANTKIT_KV_GUARD": str(path)})
    assert (settings.mode, settings.incidents.name, settings.ring_lines) == (Mode.HALT, "x.jsonl", 8)


def test_a_secret_is_shown_nowhere(tmp_path):
    path = tmp_path / "guard.json"
    path.write_text(json.dumps({"mode": "abort", "secret": "correct horse battery"}))
    settings = read_settings({"QUANTKIT_KV_GUARD": str(path)})
    assert settings.secret_bytes == b"correct horse battery"
    assert "horse" not in repr(settings)
    path.write_text(json.dumps({"mode": "abort", "secret": "my horse"}))
    with pytest.raises(KvGuardError) as refused:
        read_settings({"QUANTKIT_KV_GUARD": str(path)})
    assert "horse" not in str(refused.value)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"mode": "stop"}, "mode is 'stop'; choose off, log, abort, halt"),
        ({}, "mode is None"),
        ({"mode": "log", "ring": 3}, "unknown key 'ring'"),
        ({"mode": "log", "ring_lines": True}, "ring_lines is True"),
        ({"mode": "log", "ring_lines": 0}, "ring_lines is 0; give a whole number above 0"),
        ({"mode": "log", "most_mib": 1.5}, "most_mib is 1.5"),
        ({"mode": "log", "model": ""}, "model is ''"),
        ({"mode": "log", "secret": "short"}, "secret is no text, or too short a one"),
        ({"mode": "log", "secret": 12345678901234567}, "secret is no text"),
        ({"mode": "log", "incidents": 3}, "incidents is 3"),
        ({"mode": "log", "incidents": "not/there/i.jsonl"}, "not/there/i.jsonl': no file can be written there"),
        ({"mode": "log", "metrics": "/"}, "metrics is '/': no file can be written there"),
        ({"mode": "log", "incidents": "i" * 5000 + ".jsonl"}, "name a file in a folder that exists"),
        ({"mode": "log", "incidents": "a\0b"}, "incidents is 'a"),
        ({"mode": "log", "model": "\ud800"}, "give a text"),
        ('{"mode": "abort", "mode": "off"}', "'mode' comes twice"),
        ("[" * 100_000, "cannot be read"),
        ([], "is no JSON object"),
        ("{", "cannot be read"),
        ("", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_settings_that_mean_nothing(tmp_path, document, message):
    path = tmp_path / "guard.json"
    written = document if isinstance(document, (str, bytes)) else json.dumps(document)
    path.write_bytes(written if isinstance(written, bytes) else written.encode())
    with pytest.raises(KvGuardError, match=message):
        read_settings({"QUANTKIT_KV_GUARD": str(path)})


@pytest.mark.parametrize("value", ["", "  ", "\n"])
def test_a_blank_variable_is_no_mode(value):
    """A unit file that lost its value must not leave a server unguarded."""
    with pytest.raises(KvGuardError, match=r"QUANTKIT_KV_GUARD is blank; set it to off, log.* or leave it out"):
        read_settings({"QUANTKIT_KV_GUARD": value})
