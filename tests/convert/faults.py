"""Faults of a file system, injected where Python calls it: at the n-th call that changes something in a directory.

A suite tries some of the calls, `QUANTKIT_EVERY_CALL=1` all of them.
"""

import errno
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

# functions in ``os`` whose first argument says what is changed
CHANGES = (
    *("open", "write", "pwrite", "fsync", "fdatasync", "ftruncate"),
    *("mkdir", "rename", "replace", "unlink", "rmdir"),
)
WRITES = ("write", "pwrite")
FLUSHES = ("fsync", "fdatasync")
Fault = Callable[[str, tuple[Any, ...], Callable[..., Any]], Any]


def fail_with(number: int) -> Fault:
    """The call fails with an errno."""

    def fault(name: str, arguments: tuple[Any, ...], call: Callable[..., Any]) -> Any:
        raise OSError(number, os.strerror(number))

    return fault


def write_short(name: str, arguments: tuple[Any, ...], call: Callable[..., Any]) -> Any:
    """A write takes one byte; anything else works."""
    if name in WRITES and len(arguments[1]) > 1:
        return call(arguments[0], arguments[1][:1], *arguments[2:])
    return call(*arguments)


def die_before(name: str, arguments: tuple[Any, ...], call: Callable[..., Any]) -> Any:
    """The process is killed instead."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_middle(name: str, arguments: tuple[Any, ...], call: Callable[..., Any]) -> Any:
    """The process is killed behind half of a write, or behind anything else."""
    try:
        if name in WRITES:
            call(arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
        else:
            call(*arguments)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def tries_every_call() -> bool:
    return os.environ.get("QUANTKIT_EVERY_CALL") == "1"


def some_calls(calls: Sequence[str]) -> list[int]:
    """Numbers of the calls to try: of those in a row that do one thing to one file the first, the middle, the last."""
    numbers = range(len(calls))
    if tries_every_call():
        return list(numbers)
    rows = [list(row) for _, row in groupby(numbers, key=lambda number: calls[number])]
    return sorted({number for row in rows for number in (row[0], row[len(row) // 2], row[-1])})


def some_kills(calls: Sequence[str]) -> list[tuple[int, Fault]]:
    """Kills at some calls, each disk that they leave once.

    A kill behind a call leaves what one before the next does, and one at a flush what was there before it.
    """
    if tries_every_call():
        return [(number, fault) for number in range(len(calls)) for fault in (die_before, die_in_the_middle)]
    kills: list[tuple[int, Fault]] = [(0, die_before)]
    for number in some_calls(calls):
        name = calls[number].split()[0]
        if name not in FLUSHES:
            kills.append((number, die_in_the_middle))
        if name in WRITES and number + 1 < len(calls):
            kills.append((number + 1, die_before))
    return kills


class Faults:
    """Counts the calls that change something below ``root``; ``at`` is the number of the one that fails."""

    def __init__(self, root: Path, *, removals: bool = False) -> None:
        """``removals``: calls within a directory that is being removed count too; no error there may hurt."""
        self.root, self.removals = root, removals
        self.calls: list[str] = []
        self._lock = Lock()

    @contextmanager
    def injected(self, fault: Fault, at: int) -> Iterator[None]:
        """``fault`` takes the place of call number ``at``."""
        with pytest.MonkeyPatch.context() as patch:
            for name in CHANGES:
                patch.setattr(os, name, self._patched(name, getattr(os, name), fault, at))
            yield

    def _patched(self, name: str, call: Callable[..., Any], fault: Fault, at: int) -> Callable[..., Any]:
        def patched(*arguments: Any, **keywords: Any) -> Any:
            if not self._is_change(name, arguments, keywords):
                return call(*arguments, **keywords)
            with self._lock:
                number = len(self.calls)
                self.calls.append(f"{name} {self._path_of(arguments[0], keywords)}")
            if number == at:
                return fault(name, arguments, lambda *changed: call(*changed, **keywords))
            return call(*arguments, **keywords)

        return patched

    def _is_change(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        if name == "open" and not (len(arguments) > 1 and arguments[1] & os.O_CREAT):
            return False
        if keywords.get("dir_fd") is not None and not self.removals:
            return False
        return self._path_of(arguments[0], keywords).startswith(str(self.root))

    def _path_of(self, what: Any, keywords: dict[str, Any]) -> str:
        if keywords.get("dir_fd") is not None:
            return os.path.join(self._path_of(keywords["dir_fd"], {}), os.fspath(what))  # noqa: PTH118
        if isinstance(what, int):
            try:
                return str(Path(f"/proc/self/fd/{what}").readlink())
            except OSError:
                return ""
        return os.fspath(what) if isinstance(what, str | os.PathLike) else ""


def killed(work: Callable[[], Any], faults: Faults, fault: Fault, at: int) -> bool:
    """Whether a process of its own was killed at that change; it must not end otherwise than well."""
    child = os.fork()
    if not child:
        with suppress(BaseException):
            with faults.injected(fault, at):
                work()
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


ERRNOS = {"full": errno.ENOSPC, "broken": errno.EIO}
