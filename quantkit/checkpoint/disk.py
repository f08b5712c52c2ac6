"""What a disk does to a writer: named errors, free space, durable files."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.errors import ResourceError, UsageError

_WRONG_PLACE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP),
}


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Turns an OSError while ``path`` is written into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _WRONG_PLACE:
            raise UsageError(
                f"cannot be written ({error.strerror})", file=path, remedy="choose another directory with -o"
            ) from error
        raise ResourceError(
            f"cannot be written ({error.strerror})",
            file=path,
            remedy="free space or choose another disk with -o, then run the same command again",
        ) from error


def free_bytes(directory: Path) -> int:
    """Free bytes on the file system of ``directory``, which need not exist yet."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def flush(path: Path) -> None:
    """Make a file's content, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
