"""An output directory that appears whole or not at all.

Work happens in ``NAME.partial`` beside the target, on the same file system, under a lock on that directory itself;
``publish`` flushes and renames it. Whatever else ends the block removes it.
"""

import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from quantkit.checkpoint.disk import flush, named_errors
from quantkit.errors import UsageError

_MARKER_NAME = ".quantkit-partial"
_PARTIAL = ".partial"


def check_target(target: Path, source: Path | None) -> None:
    """Refuse a target that exists, is the source, or lies inside it (links resolved)."""
    try:
        _check_target(target, source)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"cannot be an output ({reason})", file=target, remedy="choose another with -o") from error


def _check_target(target: Path, source: Path | None) -> None:
    if target.exists() or target.is_symlink():
        raise UsageError("exists already", file=target, remedy="choose another directory with -o, or remove it")
    resolved = target.resolve()
    if source is not None and (resolved == source.resolve() or source.resolve() in resolved.parents):
        raise UsageError("lies inside the source", file=target, remedy="choose a directory outside the source")
    parent = resolved.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise UsageError("lies below something that is not a directory", file=target, remedy="choose another path")
    if len(os.fsencode(target.name + _PARTIAL)) > os.pathconf(parent, "PC_NAME_MAX"):
        raise UsageError("has too long a name", file=target, remedy="choose a shorter one with -o")


class OutputDirectory:
    """Context manager; ``directory`` is where to write until ``publish``."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.directory = target.with_name(target.name + _PARTIAL)
        self._made_parents: list[Path] = []
        self._lock = -1
        self._is_made = False

    def __enter__(self) -> "OutputDirectory":
        try:
            with named_errors(self.directory):
                self._make_parents()
                self._remove_stale()
                self.directory.mkdir()
                self._is_made = True
                self._lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                (self.directory / _MARKER_NAME).touch()
        except BaseException:
            self._remove()
            raise
        return self

    def publish(self) -> None:
        """Flush every file and name, then rename: a power cut leaves either no target or a complete one.

        The marker goes last of all: until then the directory is known as ours. Signals wait, so that nobody hears
        'interrupted' of an output that is there.
        """
        with named_errors(self.target):
            for path in self.directory.rglob("*"):
                flush(path)
            flush(self.directory)
            if self.target.exists():
                raise UsageError("appeared while it was being made", file=self.target, remedy="choose another with -o")
            with _signals_wait():
                self.directory.rename(self.target)
                self._is_made = False
                self._made_parents = []
                (self.target / _MARKER_NAME).unlink()
                flush(self.target)
                flush(self.target.parent)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        """Remove what was made and not published; the lock goes last, so that nobody takes over what is going away."""
        if self._is_made:
            shutil.rmtree(self.directory, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        for parent in reversed(self._made_parents):
            if parent.exists() and not any(parent.iterdir()):
                parent.rmdir()

    def _make_parents(self) -> None:
        missing = []
        parent = self.target.parent
        while not parent.exists():
            missing.append(parent)
            parent = parent.parent
        for place in reversed(missing):
            place.mkdir()
            self._made_parents.append(place)

    def _remove_stale(self) -> None:
        """The directory of a run that was killed is removed; one in use, or not ours, is refused."""
        if not self.directory.exists() and not self.directory.is_symlink():
            return
        if self.directory.is_symlink() or not self.directory.is_dir() or not self._is_ours():
            raise UsageError("exists and is not ours", file=self.directory, remedy="move it away, or choose another -o")
        lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.directory)
        except BlockingIOError as error:
            raise UsageError(
                "is being written by another run", file=self.directory, remedy="wait for it, or choose another -o"
            ) from error
        finally:
            os.close(lock)

    def _is_ours(self) -> bool:
        """Marked by us, or empty: killed before the mark."""
        return (self.directory / _MARKER_NAME).is_file() or not any(self.directory.iterdir())


@contextmanager
def _signals_wait() -> Iterator[None]:
    """SIGINT and SIGTERM are delivered behind the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
