"""What follows where a guard cannot go on: a server that must not run unguarded ends, another goes on, and is told."""

import logging
import subprocess
import sys
from contextlib import nullcontext

import pytest

from quantkit.kv_guard.engines.refusals import Refusals
from quantkit.kv_guard.tracker import KvGuardError, Mode

LOG = logging.getLogger("tests.refusals")
ERROR = KvGuardError("no more", remedy="none")


@pytest.mark.parametrize("mode", [Mode.ABORT, Mode.HALT])
def test_a_server_that_must_be_guarded_is_ended(mode, caplog):
    refusals = Refusals(mode, LOG)
    with pytest.raises(KvGuardError, match="no more"):
        refusals.refuse(ERROR)
    with pytest.raises(KvGuardError, match="no more"), refusals.refusing():
        raise ERROR
    assert not refusals.is_off
    assert not caplog.messages


def test_a_guard_that_logs_goes_off_once(caplog):
    refusals, acts = Refusals(Mode.LOG, LOG), []
    refusals.when_off(lambda: acts.append("first"))
    refusals.when_off(lambda: acts.append("second"))
    with refusals.refusing():
        pass
    assert (refusals.is_off, acts) == (False, [])
    for _ in range(2):
        with refusals.refusing():
            raise ERROR
    assert (refusals.is_off, acts) == (True, ["first", "second"])
    assert [line.count("the KV guard is off from here on: no more") for line in caplog.messages] == [1]


@pytest.mark.parametrize(
    ("module", "remedy"),
    [("sglang.srt", "in the engine's environment"), ("vllm", "in the engine's"), ("torch", "kv-guard")],
)
@pytest.mark.parametrize("mode", [Mode.LOG, Mode.ABORT])
def test_what_cannot_be_imported_is_named_with_what_helps(mode, module, remedy, caplog):
    refusals = Refusals(mode, LOG)
    with pytest.raises(KvGuardError) if mode is Mode.ABORT else nullcontext() as caught, refusals.refusing():
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    said = str(caught.value) if mode is Mode.ABORT else caplog.text
    assert f"it cannot be loaded: No module named {module!r}" in said
    assert remedy in said


def test_a_bug_is_no_refusal():
    refusals = Refusals(Mode.LOG, LOG)
    with pytest.raises(ZeroDivisionError), refusals.refusing():
        raise ZeroDivisionError
    assert not refusals.is_off


@pytest.mark.parametrize("entry", ["sglang.plugin import load as enter", "vllm.plugin import register as enter"])
@pytest.mark.parametrize("mode", ["log", "abort"])
def test_an_engine_that_is_missing_follows_the_mode(entry, mode):
    """In log it is said once, and the process goes on; a server that was told to abort does not run unguarded."""
    code = f"from quantkit.kv_guard.engines.{entry}; enter(); print('goes on')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"QUANTKIT_KV_GUARD": mode, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = "it cannot be loaded: No module named"
    assert ("goes on" in done.stdout, done.returncode == 0) == (mode == "log", mode == "log"), done.stderr
    assert done.stderr.count(said) == 1
    assert done.stderr.count("load the guard in the engine's environment") == 1
