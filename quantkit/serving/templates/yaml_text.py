"""YAML by hand: a library would drop the comments."""

import json
from collections.abc import Iterable, Iterator


def quoted(text: str) -> str:
    """A double-quoted scalar: YAML reads what JSON escapes, but for the pairs that it makes of high characters."""
    return f'"{"".join(_escaped(one) for one in text)}"'


def _escaped(one: str) -> str:
    return f"\\U{ord(one):08x}" if ord(one) > 0xFFFF else json.dumps(one)[1:-1]


def sequence(words: Iterable[tuple[str, str]], indent: int) -> Iterator[str]:
    """Quoted entries, with a comment behind those that have one."""
    for word, comment in words:
        yield f"{' ' * indent}- {quoted(word)}{f'  # {comment}' if comment else ''}"
