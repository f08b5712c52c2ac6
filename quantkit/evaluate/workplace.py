"""Where hidden states are kept: in memory while they are few, else in a directory of ours that goes with them."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.checkpoint.disk import make_directories, remove_empty
from quantkit.errors import UsageError

MOST_IN_MEMORY = 1 << 29  # bytes
_PREFIX = ".quantkit-states-"


@contextmanager
def workplace(work: Path | None, *, beside: Path, needed_bytes: int) -> Iterator[Path | None]:
    """A new directory in ``work``, or, where none was named, in ``beside`` if memory is not to hold so many bytes.

    ``work`` goes with it where it was not there before.
    """
    if work is None and needed_bytes <= MOST_IN_MEMORY:
        yield None
        return
    parent = beside if work is None else work
    made: list[Path] = []
    try:
        make_directories(parent, made)
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        remove_empty(made)
        raise UsageError(
            f"hidden states cannot be kept in {parent} ({error.strerror})", remedy="name a directory with --work"
        ) from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
        remove_empty(made)
