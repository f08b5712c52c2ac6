"""A flag of a command line with its reason, and a server as the argument vector that starts it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from quantkit.errors import UsageError

ServerRole = Literal["prefill", "decode", "both", "router"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """``why``: one line. ``is_agreed``: both pools of a pair must be started with the same."""

    name: str
    values: tuple[str, ...] = ()
    why: str = ""
    is_agreed: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        return (self.name, *self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One process on one node. ``argv`` is what every template wraps, and nothing else.

    ``directories``: of this machine, that it reads. ``ports``: by name, that others reach it at.
    """

    name: str
    role: ServerRole
    host: str
    program: tuple[str, ...]
    flags: tuple[Flag, ...]
    num_gpus: int = 0
    node_rank: int = 0
    directories: tuple[str, ...] = ()
    ports: tuple[tuple[str, int], ...] = ()

    @property
    def argv(self) -> tuple[str, ...]:
        return (*self.program, *(word for flag in self.flags for word in flag.words))


def flag(name: str, *values: object, why: str, is_agreed: bool = False) -> Flag:
    """Values become words; a reason becomes one line of printable text."""
    words = tuple(map(str, values))
    for word in words:
        check_word(word, of=name)
    return Flag(name=name, values=words, why=one_line(why), is_agreed=is_agreed)


def check_word(word: str, *, of: str) -> None:
    """Raise UsageError for what no script, unit or manifest holds as one word on one line."""
    if not word or not word.isprintable():
        raise UsageError(f"{of} {word!r} cannot stand in a launch line", remedy="rename it: printable characters only")


def one_line(text: str) -> str:
    """Reasons become comments: a line break in one would end it."""
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())


def flags_of_words(words: str, *, why: str) -> Iterable[Flag]:
    """Of a text like ``--tp-size 8``."""
    name, *values = words.split()
    yield flag(name, *values, why=why)
