"""The file of ``--summary``: Markdown is appended to it, whatever of other jobs or steps is there already."""

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from quantkit.cli.apart import check_apart
from quantkit.errors import UsageError

OPTION = "--summary"
COMMANDS = ("plan", "convert", "relayout", "verify", "memory-plan", "gate", "evaluate")
_SUFFIXES = ("", ".md", ".markdown", ".txt")  # GitHub names its file without any
_REMEDY = "give a regular file, or a new one in a directory that is there"


def check_summary(path: Optional[Path]) -> Optional[Path]:  # noqa: UP045  (typer calls it)
    """Before anything is done. Raises UsageError for what no summary is appended to."""
    if path is None:
        return None
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"{OPTION} {path} is not the name of a summary", remedy="give a name that ends in .md")
    place = path
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise UsageError(f"{OPTION} {path} lies in no directory that is there", remedy=_REMEDY) from None
        place = path.parent
    except OSError as error:
        raise _unwritable(path, error) from error
    else:
        if not stat.S_ISREG(mode):
            raise UsageError(f"{OPTION} {path} is no regular file", remedy=_REMEDY)
    if not os.access(place, os.W_OK):
        raise UsageError(f"{OPTION} {path} may not be written", remedy=_REMEDY)
    check_apart(path, OPTION)
    return path


def add_summary(path: Path | None, document: Mapping[str, Any]) -> None:
    """Append what a command's own JSON document says. Raises UsageError where that cannot be."""
    if path is None:
        return
    from quantkit.cli.summary import summary

    check_summary(path)
    content = summary(document).encode(errors="backslashreplace")
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o644)
        with os.fdopen(descriptor, "ab") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"{OPTION} {path} is no regular file", remedy=_REMEDY)
            stream.write(b"\n" + content if status.st_size else content)
    except OSError as error:
        raise _unwritable(path, error) from error


def asked_for(command: str, arguments: Sequence[str]) -> Path | None:
    """The file that a command line names, where its command has the option: for what ended before it was parsed."""
    if command not in COMMANDS:
        return None
    path = None
    for argument, following in zip(arguments, (*arguments[1:], None), strict=True):
        if argument == OPTION:
            path = following
        elif argument.startswith(f"{OPTION}="):
            path = argument.removeprefix(f"{OPTION}=")
    return None if path is None or path.startswith("-") else Path(path)


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{OPTION} {path} cannot be written ({error.strerror})", remedy=_REMEDY)
