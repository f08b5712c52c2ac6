"""An output directory that appears whole or not at all.

Work happens in ``NAME.partial`` beside the target, on the same file system, under a lock on that directory itself;
``publish`` flushes and renames it. Whatever else ends the block removes it.
"""

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

from quantkit.checkpoint.disk import flush, named_errors
from quantkit.errors import UsageError

_MARKER_NAME = ".quantkit-partial"
_LAST_FILE_NAME = "conversion.json"  # written last: where it stands the marker may be gone already


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
        """Flush every file and name, then rename: a power cut leaves either no target or a complete one."""
        with named_errors(self.target):
            (self.directory / _MARKER_NAME).unlink()
            for path in self.directory.rglob("*"):
                flush(path)
            flush(self.directory)
            if self.target.exists():
                raise UsageError("appeared while it was being made", file=self.target, remedy="choose another with -o")
            self.directory.rename(self.target)
            self._is_made = False
            self._made_parents = []
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
        is_ours = (self.directory / _MARKER_NAME).is_file() or (self.directory / _LAST_FILE_NAME).is_file()
        if self.directory.is_symlink() or not is_ours:
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
