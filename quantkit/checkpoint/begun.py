"""What a run is, written down in its directory as it begins: whoever comes with something else is told what differs."""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from quantkit.checkpoint.disk import (
    draft_of,
    is_own_directory,
    make_directories,
    named_errors,
    remove,
    remove_empty,
    write_whole,
)
from quantkit.checkpoint.file_names import BEGUN_NAME, WORDS_NAME
from quantkit.checkpoint.json_files import read_json
from quantkit.checkpoint.locks import locked
from quantkit.errors import QuantkitError, SourceError, UsageError

_MOST_DIFFERENCES = 3
_DIGEST_CHARACTERS = 64  # of a sha256
WHY = "a run that was begun has it"


@contextmanager
def run_directory(
    directory: Path, document: Mapping[str, Any], *, resume: bool, has_work: Callable[[Path], bool]
) -> Iterator[None]:
    """A directory for the work of one run, new or as that run has left it; nobody else's until the block ends.

    Raises UsageError for one of another run, of somebody else, or in use; without ``resume`` the former is emptied. Who
    removes it does so within the block, by ``remove_run``. What ends the block otherwise leaves nothing of it where
    ``has_work`` finds nothing finished.
    """
    is_there = directory.exists() or directory.is_symlink()
    if is_there and not (is_own_directory(directory) and _is_known(directory)):
        raise UsageError("is there and not ours", file=directory, remedy="remove it, or choose another -o")
    made: list[Path] = []
    with ExitStack() as stack:
        stack.callback(remove_empty, made)
        with named_errors(directory):
            make_directories(directory.parent, made)
            directory.mkdir(exist_ok=True)
            lock = locked(directory, exclusive=True)
        stack.callback(os.close, lock)
        _begin(directory, lock, document, resume=resume)
        try:
            yield
        except BaseException as error:
            if _is_held(directory, lock):
                if has_work(directory):
                    error.add_note(f"{directory}: what is finished is kept there, and {_goes_on(error)}")
                else:
                    with suppress(OSError, QuantkitError):  # which would hide what has happened
                        remove_run(directory)
            raise


def _goes_on(error: BaseException) -> str:
    """A source that was repaired is another than the one that the run was begun with."""
    if isinstance(error, SourceError):
        return "the same command goes on with the source as it is; behind a repair, give --no-resume to begin anew"
    return "the same command goes on"


def _is_held(directory: Path, lock: int) -> bool:
    """Not where whoever had the lock before has removed it: then it is away, or another's."""
    return directory.exists() and os.path.samestat(os.fstat(lock), directory.stat())


def remove_run(directory: Path) -> None:
    """All of it. The document of words goes last but one, then the run's: the rest is known by them, cut or not."""
    for inner in sorted(directory.iterdir(), key=lambda one: (one.name == BEGUN_NAME, one.name == WORDS_NAME)):
        remove(inner)
    directory.rmdir()


def remove_left(directory: Path, is_used: Callable[[Mapping[str, Any]], bool]) -> None:
    """What a run worked in that was killed behind its last rename: its output is there, and never asks for it again.

    ``is_used``: whether the run of this document has made the output. What is not known to have, or is in use, is left
    alone.
    """
    if not is_own_directory(directory):
        return
    with suppress(OSError, QuantkitError):
        lock = locked(directory, exclusive=True)
        try:
            path = directory / BEGUN_NAME
            if not any(directory.iterdir()):  # cut behind the last of it
                directory.rmdir()
            elif path.is_file() and is_used(read_json(path, what=WHY)):
                remove_run(directory)
        finally:
            os.close(lock)


def _begin(directory: Path, lock: int, document: Mapping[str, Any], *, resume: bool) -> None:
    path = directory / BEGUN_NAME
    with named_errors(directory):
        if not _is_held(directory, lock):
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


def _is_known(directory: Path) -> bool:
    """By its document; or empty but for the draft of one: a run was cut before it had begun."""
    is_begun = (directory / BEGUN_NAME).is_file()
    return is_begun or all(inner == draft_of(directory / BEGUN_NAME) for inner in directory.iterdir())


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
