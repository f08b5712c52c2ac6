"""What a run is, written down in its directory as it begins: whoever comes with something else is told what differs."""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.checkpoint.disk import is_own_directory, named_errors, remove, write_whole
from quantkit.checkpoint.json_files import read_json
from quantkit.checkpoint.locks import locked
from quantkit.errors import SourceError, UsageError

_MOST_DIFFERENCES = 3
_DIGEST_CHARACTERS = 64  # of a sha256
BEGUN_NAME = "begun.json"
WHY = "a run that was begun has it"


@contextmanager
def run_directory(directory: Path, document: Mapping[str, Any], *, resume: bool) -> Iterator[None]:
    """A directory for the work of one run, new or as that run has left it; nobody else's until the block ends.

    Raises UsageError for one of another run, of somebody else, or in use; without ``resume`` the former is emptied. Who
    removes it does so within the block.
    """
    path = directory / BEGUN_NAME
    is_there = directory.exists() or directory.is_symlink()
    if is_there and not (is_own_directory(directory) and (path.is_file() or _is_empty(directory, path.name))):
        raise UsageError("is there and not ours", file=directory, remedy="remove it, or choose another -o")
    with named_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = locked(directory, exclusive=True)
    try:
        _begin(path, lock, document, resume=resume)
        try:
            yield
        except BaseException as error:
            if directory.exists():
                error.add_note(f"{directory}: what is finished is kept there, and the same command goes on")
            raise
    finally:
        os.close(lock)


def _begin(path: Path, lock: int, document: Mapping[str, Any], *, resume: bool) -> None:
    directory = path.parent
    with named_errors(directory):
        if not directory.exists() or os.fstat(lock).st_ino != directory.stat().st_ino:
            raise UsageError(
                "another run has just ended here", file=directory, remedy="look at its output, or run again"
            )
        for inner in sorted(directory.iterdir(), key=lambda one: one == path) if not resume else ():
            remove(inner)  # the document last: by it the rest is known
        if not path.exists():
            write_whole(path, json.dumps(document, indent=2, sort_keys=True).encode() + b"\n")
    try:
        begun = read_json(path, what=WHY)
    except SourceError as error:
        raise SourceError(error.message, file=path, remedy="give --no-resume to begin anew") from error
    shown = differences_text(differences(begun, document))
    if shown:
        raise UsageError(
            f"holds work of a run that differs: {shown}",
            file=directory,
            remedy="repeat that run's command, choose another -o, or give --no-resume to begin anew",
        )


def _is_empty(directory: Path, name: str) -> bool:
    """But for the draft of a document: a run was cut before it had begun."""
    return all(inner.name == f"{name}.draft" for inner in directory.iterdir())


def differences(there: Any, here: Any, told: Collection[str] = (), place: str = "") -> Iterator[str]:
    """In what two documents differ. A hash has changed and is not shown, unless its place is ``told``."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in dict.fromkeys((*there, *here)):
            inner = f"{place}.{key}" if place else str(key)
            if key not in here:
                yield f"{inner} is no longer there"
            elif key not in there:
                yield f"{inner} is new"
            else:
                yield from differences(there[key], here[key], told, inner)
    elif there != here:
        is_digest = isinstance(there, str) and len(there) == _DIGEST_CHARACTERS and place not in told
        yield f"{place} has changed" if is_digest else f"{place} was {short(there)} and is {short(here)}"


def differences_text(found: Iterable[str]) -> str:
    """The first of them; empty where there are none."""
    texts = list(found)
    more = f"; and {len(texts) - _MOST_DIFFERENCES} more" if len(texts) > _MOST_DIFFERENCES else ""
    return f"{'; '.join(texts[:_MOST_DIFFERENCES])}{more}"


def short(value: Any) -> str:
    """JSON of a value, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
