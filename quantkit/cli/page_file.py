"""Writes a page into a file that the user names: whole or not at all, over an older page of ours and nothing else."""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from quantkit.cli import render
from quantkit.errors import UsageError

_SUFFIXES = (".html", ".htm")


def write_page(path: Path, page: str, *, is_ours: str) -> None:
    """``is_ours``: how every page of ours begins, whatever it tells. Raises UsageError for a file that is none."""
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"--html {path} is not the name of a page", remedy="give a file whose name ends in .html")
    try:
        _check_place(path, is_ours)
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=".quantkit-", suffix=".html")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as stream:
                os.fchmod(descriptor, 0o644)
                stream.write(render.printable(page))
            Path(draft).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(draft).unlink()
            raise
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror})", remedy="give --html another file") from error


def _check_place(path: Path, is_ours: str) -> None:
    try:
        is_regular = stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_regular:
        raise UsageError(f"--html {path} is there and is no regular file", remedy="give another file")
    beginning = is_ours.encode()
    with path.open("rb") as stream:
        if stream.read(len(beginning)) != beginning:
            raise UsageError(f"--html {path} is there and is no page of ours", remedy="move it away, or give another")
