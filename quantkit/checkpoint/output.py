"""An output directory that appears whole or not at all, while the work in it outlives the process that does it.

Work happens in ``NAME.partial`` beside the target, on the same file system, under a lock on that directory itself.
What is no output lies in ``.quantkit/`` in it: the journal, locks, the spool. ``put_in_place`` flushes and renames;
what else ends the block keeps the directory where it holds finished work.
"""

import os
import shutil
import signal
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from quantkit.checkpoint.begun import remove_left
from quantkit.checkpoint.disk import (
    flush,
    flush_tree,
    is_own_directory,
    make_directories,
    named_errors,
    remove,
    remove_empty,
    write_file,
)
from quantkit.checkpoint.file_names import BEGUN_NAME, MANIFEST_NAME, RUN_NAME, WORDS_NAME, WORDS_SUFFIX
from quantkit.checkpoint.json_files import MOST_INDEX_BYTES, read_json
from quantkit.checkpoint.locks import locked
from quantkit.checkpoint.reader import hash_file
from quantkit.checkpoint.whole_file import named_paths
from quantkit.errors import QuantkitError, ResourceError, UsageError

WORK_NAME = ".quantkit"
_DONE_NAME = ".quantkit.done"  # the same, of an output that is in place: there is nothing in it to go on from
_PARTIAL = ".partial"
_ANOTHER = "choose another with -o"


def check_target(target: Path, source: Path | None) -> None:
    """Refuse a target that exists, is the source, or lies inside it (links resolved)."""
    with named_paths(target):
        _check_target(target, source)


def _check_target(target: Path, source: Path | None) -> None:
    if target.exists() or target.is_symlink():
        finish_renaming(target)
        raise UsageError("exists already", file=target, remedy="choose another directory with -o, or remove it")
    resolved = target.resolve()
    if source is not None:
        places = (resolved, partial_of(resolved))
        if any(_overlap(source.resolve(), place) for place in places):
            raise UsageError(
                "or its partial directory overlaps the source", file=target, remedy="choose a directory apart from it"
            )
    parent = resolved.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise UsageError("lies below something that is not a directory", file=target, remedy="choose another path")
    if len(os.fsencode(target.name + _PARTIAL)) > os.pathconf(parent, "PC_NAME_MAX"):
        raise UsageError("has too long a name", file=target, remedy="choose a shorter one with -o")


def _overlap(source: Path, place: Path) -> bool:
    return source == place or source in place.parents or place in source.parents


def finish_renaming(target: Path) -> None:
    """Of a run that was killed behind its rename: the output is whole, and still carries what is no output.

    Words of calibration that it was made of lie beside it.
    """
    _remove_used_words(target)
    marks = [mark for name in (WORK_NAME, _DONE_NAME) if is_own_directory(mark := target / name)]
    is_whole = not target.is_symlink() and (target / MANIFEST_NAME).is_file()
    if not is_whole or not any((mark / RUN_NAME).is_file() for mark in marks):
        return  # whosever it is
    with suppress(OSError, QuantkitError):
        lock = locked(target, exclusive=True)  # nobody is just about to do it
        try:
            for mark in marks:
                _remove_work(mark)
        finally:
            os.close(lock)


def _remove_used_words(target: Path) -> None:
    """Those of a conversion that may still be made of them are left alone: the output names its own by their hash."""
    words = target.with_name(target.name + WORDS_SUFFIX)
    if not is_own_directory(words) or target.is_symlink():
        return

    def is_used(_: Mapping[str, Any]) -> bool:
        document = words / WORDS_NAME
        if document.is_file():
            return hash_file(document) == str(sha256)
        return all(inner.name == BEGUN_NAME for inner in words.iterdir())

    with suppress(OSError, QuantkitError, LookupError, TypeError):
        manifest = read_json(target / MANIFEST_NAME, what="an output has it", most_bytes=MOST_INDEX_BYTES)
        sha256 = manifest["calibration"]["words_sha256"]
        remove_left(words, is_used)


def partial_of(target: Path) -> Path:
    """Where the work for a target is done."""
    return target.with_name(target.name + _PARTIAL)


def _remove_work(work: Path) -> None:
    """The run's document last: by it the rest is known, and believed only with it."""
    for path in sorted(work.iterdir(), key=lambda path: path.name == RUN_NAME):
        remove(path)
    work.rmdir()


class OutputDirectory:
    """Context manager; ``directory`` is where to write until ``put_in_place``, ``work`` where what is no output lies.

    ``rank``: of several that share the directory; without one, nobody else may be in it. ``keep`` says whether what
    is there outlives an error; ranks always leave it.
    """

    def __init__(self, target: Path, *, rank: int | None = None) -> None:
        self.target = target
        self.directory = partial_of(target)
        self.work = self.directory / WORK_NAME
        self.keep = False
        self._rank = rank
        self._made_parents: list[Path] = []
        self._locks: list[int] = []

    def __enter__(self) -> "OutputDirectory":
        try:
            with named_errors(self.directory):
                make_directories(self.target.parent, self._made_parents)
                self._claim()
                self._check_rename()
        except BaseException:
            self._leave()
            raise
        return self

    def put_in_place(self) -> None:
        """Flush every file and name, then rename: a power cut leaves either no target or a complete one.

        What is no output goes last of all; where this run is cut, the next does it by ``finish_renaming``. Signals
        wait, so that nobody hears 'interrupted' of an output that is there.
        """
        assert self._rank is None
        with named_errors(self.target):
            for path in self.directory.iterdir():
                if path.name != WORK_NAME:
                    flush_tree(path)
            flush(self.directory)
            if self.target.exists():
                self.keep = True
                raise UsageError("appeared while it was being made", file=self.target, remedy=_ANOTHER)
            with _signals_wait():
                self.directory.rename(self.target)
                self._made_parents = []
                flush(self.target.parent)
                with suppress(FileNotFoundError):  # another run has found it, and done so
                    (self.target / WORK_NAME).rename(self.target / _DONE_NAME)
                with suppress(FileNotFoundError):
                    _remove_work(self.target / _DONE_NAME)
                flush(self.target)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def start_over(self) -> None:
        """Throw away whatever an earlier run has left."""
        self.clear(set())
        with named_errors(self.work):
            _remove_work(self.work)
            self.work.mkdir()
        self.keep = False

    def clear(self, kept: Collection[str], among: Collection[str] | None = None) -> None:
        """Remove what an earlier run left half done: everything but the files named and what is no output.

        ``among``: names to look at; others belong to other ranks.
        """
        with named_errors(self.directory):
            for path in sorted(self.directory.iterdir()):
                if path.name == WORK_NAME or path.name in kept or (among is not None and path.name not in among):
                    continue
                remove(path)

    def _leave(self) -> None:
        """Remove what is not worth keeping; the locks go last, so that nobody takes over what is going away."""
        if self._locks and self._rank is None and not self.keep:
            self._remove()
        for lock in self._locks:
            os.close(lock)
        self._locks = []
        remove_empty(self._made_parents)

    def _remove(self) -> None:
        """What is known by the mark goes first and the mark last: a kill in between leaves what is still ours."""
        with suppress(OSError, QuantkitError):
            self.clear(set())
            _remove_work(self.work)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _claim(self) -> None:
        """Make the directory, or take over what a run has left; one in use, or not ours, is refused."""
        while not self._locks:
            if self.directory.exists() or self.directory.is_symlink():
                self._check_ours()
                self.keep = self.keep or self.work.is_dir()
                self._lock_directory()
            else:
                with suppress(FileExistsError):  # another rank was quicker
                    self.directory.mkdir()
                    self._lock_made()
                    flush(self.directory.parent)
        self.work.mkdir(exist_ok=True)
        if self._rank is not None:
            path = self.work / f"rank-{self._rank}.lock"
            self._locks.append(locked(path, exclusive=True, flags=os.O_CREAT | os.O_RDWR | os.O_NONBLOCK))

    def _lock_made(self) -> None:
        try:
            self._lock_directory()
        except BaseException:
            with suppress(OSError):
                self.directory.rmdir()
            raise

    def _lock_directory(self) -> None:
        """Unless whoever held it has just removed it."""
        with suppress(FileNotFoundError):
            lock = locked(self.directory, exclusive=self._rank is None)
            if os.path.samestat(os.fstat(lock), self.directory.stat()):
                self._locks.append(lock)
            else:
                os.close(lock)

    def _check_ours(self) -> None:
        """Marked by us, or empty: killed before the mark."""
        if is_own_directory(self.directory) and (is_own_directory(self.work) or not any(self.directory.iterdir())):
            return
        raise UsageError("exists and is not ours", file=self.directory, remedy="move it away, or choose another -o")

    def _check_rename(self) -> None:
        """Whether a directory that holds something can be renamed here: on some object stores it cannot."""
        probe = self.work / f"probe-{self._rank}"
        renamed = probe.with_suffix(".renamed")
        for path in (probe, renamed):  # of a run that was killed
            shutil.rmtree(path, ignore_errors=True)
        probe.mkdir()
        write_file(probe / "file", b"")
        try:
            probe.rename(renamed)
        except OSError as error:
            raise ResourceError(
                f"the file system cannot rename directories ({error.strerror})",
                file=self.target.parent,
                remedy="give another with -o, and copy the output there when it is done",
            ) from error
        finally:
            for path in (probe, renamed):
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """What a signal would break off is done first; and then it is done, and nothing is left to break off.

    By handlers and not by masks: the kernel may give a signal to any thread, and Python runs its handler in the main.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
