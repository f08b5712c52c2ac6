"""A file that the user names, no part of a checkpoint: nobody downloads it again, and its path tells which it is."""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.checkpoint.header import Header, read_header
from quantkit.errors import SourceError


def check_regular(path: Path, *, remedy: str) -> None:
    """Raise SourceError for what is not there, and for what may never end: a pipe, a device, a folder."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise SourceError(f"cannot be read ({error.strerror})", file=path, remedy="check the path") from error
    if not stat.S_ISREG(mode):
        raise SourceError("is not a regular file", file=path, remedy=remedy)


@contextmanager
def as_given(path: Path, *, remedy: str) -> Iterator[None]:
    """What is said of a shard while ``path`` is read is said of this file: by its whole path, with its own remedy."""
    try:
        yield
    except SourceError as error:
        if error.file != path.name:
            raise
        raise SourceError(error.message, tensor=error.tensor, file=path, remedy=remedy) from error


def read_given_header(path: Path, *, remedy: str) -> Header:
    """Of a safetensors file. Raises SourceError for anything else."""
    check_regular(path, remedy=remedy)
    with as_given(path, remedy=remedy):
        return read_header(path)
