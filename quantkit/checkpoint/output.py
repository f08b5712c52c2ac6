"""An output directory that appears whole or not at all.

Work happens in ``NAME.partial`` beside the target, on the same file system; ``publish`` renames it. Whatever else
ends the block removes the partial directory.
"""

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

from quantkit.checkpoint.disk import flush_directory, named_errors
from quantkit.errors import UsageError

_LOCK_NAME = ".quantkit-lock"


def check_target(target: Path, source: Path | None) -> None:
    """Refuse a target that exists, is the source, or lies inside it (links resolved)."""
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


class OutputDirectory:
    """Context manager; ``directory`` is where to write until ``publish``."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.directory = target.with_name(target.name + ".partial")
        self._made_parents: list[Path] = []
        self._lock = -1
        self._is_published = False

    def __enter__(self) -> "OutputDirectory":
        with named_errors(self.directory):
            self._make_parents()
            self._remove_stale()
            self.directory.mkdir()
            self._lock = os.open(self.directory / _LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def publish(self) -> None:
        """Flush everything to the disk, then rename: a power cut leaves either no target or a complete one."""
        with named_errors(self.target):
            (self.directory / _LOCK_NAME).unlink()
            for path in self.directory.rglob("*"):
                if path.is_dir():
                    flush_directory(path)
            flush_directory(self.directory)
            if self.target.exists():
                raise UsageError("appeared while it was being made", file=self.target, remedy="choose another with -o")
            self.directory.rename(self.target)
            self._is_published = True
            flush_directory(self.target.parent)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        if not self._is_published:
            shutil.rmtree(self.directory, ignore_errors=True)
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
        """A partial directory of a run that was killed is removed; one in use, or not ours, is refused."""
        if not self.directory.exists() and not self.directory.is_symlink():
            return
        lock_path = self.directory / _LOCK_NAME
        if not lock_path.is_file() or self.directory.is_symlink():
            raise UsageError("exists and is not ours", file=self.directory, remedy="move it away, or choose another -o")
        lock = os.open(lock_path, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.directory)
        except BlockingIOError as error:
            raise UsageError(
                "is being written by another run",
                file=self.directory,
                remedy="wait for it, or choose another -o",
            ) from error
        finally:
            os.close(lock)
