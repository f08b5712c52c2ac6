"""Everything that may go wrong for a user: one class per exit code."""

from pathlib import Path

_MOST_CHARACTERS = 500


def _short(text: str) -> str:
    """What is quoted of a hostile file has no end."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def first_line(error: object) -> str:
    """Of what a library says, which may be pages; its class where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class QuantkitError(Exception):
    """Base of all errors that are a user's or an input's fault, never a bug.

    The message says what is wrong; ``remedy`` what to do; ``tensor`` and ``file`` where.
    The command line prints one line and exits with ``exit_code``.
    """

    exit_code = 1

    def __init__(
        self, message: str, *, remedy: str = "", tensor: str | None = None, file: str | Path | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.tensor = tensor
        self.file = None if file is None else str(file)

    def __str__(self) -> str:
        where = ": ".join(_short(part) for part in (self.file, self.tensor) if part)
        text = f"{where}: {_short(self.message)}" if where else _short(self.message)
        line = f"{text}; {self.remedy}" if self.remedy else text
        return " ".join(line.split())


class UsageError(QuantkitError):
    """A command, an option or a path that cannot be meant."""

    exit_code = 2


def not_installed(what: str, missing: str, *, extra: str, file: str | Path | None = None) -> UsageError:
    """The error where ``what`` needs a package of an optional ``extra`` of ours that is not installed."""
    return UsageError(f"{what} needs {missing} (not installed here)", file=file, remedy=install_remedy(extra))


def install_remedy(extra: str) -> str:
    """How an extra is installed: from a clone, since what is called quantkit on PyPI is somebody else's."""
    return f"run pip install '.[{extra}]' in the clone of quantkit"


class RecipeError(UsageError):
    """A recipe, rule, group size or name that does not fit."""


class SourceError(QuantkitError):
    """What is to be read is not there, is bad or cannot be fetched: a source, a config, a log, an output."""

    exit_code = 3


class VerificationError(QuantkitError):
    """An output is damaged, or misses a threshold."""

    exit_code = 4


class ResourceError(QuantkitError):
    """It does not fit on this disk or in this memory."""

    exit_code = 5
