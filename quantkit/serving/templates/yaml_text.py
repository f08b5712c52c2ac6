"""YAML by hand: a library would drop the comments."""

import json
from collections.abc import Iterable, Iterator


def quoted(text: str) -> str:
    """A double-quoted scalar: what JSON escapes, YAML reads alike."""
    return json.dumps(text)


def sequence(words: Iterable[tuple[str, str]], indent: int) -> Iterator[str]:
    """Quoted entries, with a comment behind those that have one."""
    for word, comment in words:
        yield f"{' ' * indent}- {quoted(word)}{f'  # {comment}' if comment else ''}"
