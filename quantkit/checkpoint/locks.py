"""A lock on a file or directory that ends with the process which has it."""

import errno
import fcntl
import os
from pathlib import Path

from quantkit.errors import ResourceError, UsageError

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def locked(path: Path, *, exclusive: bool, flags: int = os.O_RDONLY | os.O_DIRECTORY) -> int:
    """A locked descriptor. UsageError where another process has it, ResourceError where there are no locks."""
    lock = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(lock, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise UsageError(
                "is being written by another run", file=path, remedy="wait for it, or choose another -o"
            ) from error
        if error.errno in _NO_LOCKS:
            raise ResourceError(
                f"cannot be locked ({error.strerror})",
                file=path,
                remedy="mount the file system with locks (flock), or choose another with -o",
            ) from error
        raise
    return lock
