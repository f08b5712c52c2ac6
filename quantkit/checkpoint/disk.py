"""What a disk does to a writer: named errors, free space, durable files. Everything written passes through here."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quantkit.errors import ResourceError, UsageError

Buffer = bytes | bytearray | memoryview

_WRONG_PLACE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP),
}
_NO_HANDLES = {errno.EMFILE, errno.ENFILE}

FULL = {errno.ENOSPC, errno.EDQUOT}
_PIECE_BYTES = 1 << 30  # of one system call


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
        if error.errno in _NO_HANDLES:
            raise ResourceError(
                f"cannot be opened ({error.strerror})",
                file=path,
                remedy="raise the limit of open files (`ulimit -n`) or give fewer --jobs",
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


def write_bytes(descriptor: int, data: Buffer, position: int | None = None) -> None:
    """All of it, however little the system takes at once; behind what is there where no ``position`` is given."""
    view = memoryview(data).cast("B")
    while view:
        piece = view[:_PIECE_BYTES]
        count = os.write(descriptor, piece) if position is None else os.pwrite(descriptor, piece, position)
        if count == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        view = view[count:]
        if position is not None:
            position += count


def write_file(path: Path, content: Buffer) -> None:
    """A file of its own, whole and durable; it must not be there yet."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    try:
        write_bytes(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def draft_of(path: Path) -> Path:
    """Under what name a file is written until it is whole, over what a run that was cut has left there.

    Nobody else's: it stands beside files of the user's, too.
    """
    return path.with_name(f".quantkit-{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}.draft")


def write_whole(path: Path, content: Buffer) -> None:
    """A file that is there with all of its content or not at all, whatever was there before; durable."""
    draft = draft_of(path)
    draft.unlink(missing_ok=True)
    write_file(draft, content)
    put_in_place(draft, path)


def put_in_place(draft: Path, path: Path) -> None:
    """A file whose content is durable gets its name, over an older one; durable before the caller goes on."""
    draft.replace(path)
    flush(path.parent)


def make_directories(directory: Path, made: list[Path]) -> None:
    """A directory and what is missing above it; durable. ``made`` gets each that is made, the outermost first."""
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for place in reversed(missing):
        place.mkdir(exist_ok=True)
        made.append(place)
        flush(place.parent)


def remove_empty(made: Iterable[Path]) -> None:
    """What ``make_directories`` has made, unless something lies in it: somebody else's work, or what is kept."""
    for place in reversed(list(made)):
        with suppress(OSError):
            place.rmdir()


def is_own_directory(path: Path) -> bool:
    """A directory, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def remove(path: Path) -> None:
    """Whatever it is; nothing behind links."""
    if is_own_directory(path):
        shutil.rmtree(path)
    else:
        path.unlink()


def flush_tree(path: Path) -> None:
    """A file, or a directory with all that lies in it; nothing behind links."""
    if is_own_directory(path):
        for inner in path.iterdir():
            flush_tree(inner)
    flush(path)


def flush(path: Path) -> None:
    """Make a file's content, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
