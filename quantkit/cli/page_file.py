"""What pages have in common, and how one is written into a file that the user names: whole or not at all, over an older
page of ours and nothing else.
"""

import os
import stat
import tempfile
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from quantkit.cli import render
from quantkit.cli.apart import check_apart
from quantkit.errors import UsageError

HTML_OPTION = "--html"
_SUFFIXES = (".html", ".htm")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page_begin(title: str) -> str:
    """How every page of a kind begins; ``title``: the first words of all their titles."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<title>{title}"""


def style(own: str) -> str:
    """A kind's own style sheet, and behind it the one of all, whose rules for print come last."""
    return "".join(files("quantkit.cli").joinpath(name).read_text(encoding="utf-8") for name in (own, "page.css"))


def check_page(path: Path, *, is_ours: str, option: str = HTML_OPTION) -> None:
    """Before anything is done. Raises UsageError for a file that ``write_page`` would not write."""
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"{option} {path} is not the name of a page", remedy="give a file whose name ends in .html")
    try:
        _check_place(path, is_ours, option)
        if not path.parent.is_dir():
            raise UsageError(f"{option} {path} lies in no directory that is there", remedy="make the directory")
        check_apart(path, option)
    except OSError as error:
        raise _unwritable(path, error, option) from error


def write_page(path: Path, page: str, *, is_ours: str, option: str = HTML_OPTION) -> None:
    """``is_ours``: how every page of ours begins, whatever it tells. Raises UsageError for a file that is none."""
    check_page(path, is_ours=is_ours, option=option)
    try:
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
        raise _unwritable(path, error, option) from error


def _unwritable(path: Path, error: OSError, option: str) -> UsageError:
    return UsageError(f"{path} cannot be written ({error.strerror})", remedy=f"give {option} another file")


def _check_place(path: Path, is_ours: str, option: str) -> None:
    try:
        is_regular = stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_regular:
        raise UsageError(f"{option} {path} is there and is no regular file", remedy="give another file")
    beginning = is_ours.encode()
    with path.open("rb") as stream:
        if stream.read(len(beginning)) != beginning:
            raise UsageError(f"{option} {path} is there and is no page of ours", remedy="move it away, or give another")
