"""Entries that name modules: an exact name, or ``re:`` and a regular expression matched from the start of the name.

The rule of compressed-tensors, SGLang and vLLM: anchored at the start and not at the end.
"""

import re
from collections.abc import Callable, Iterable


def is_matched(entry: str, name: str) -> bool:
    """Whether one entry hits a name. Raises re.error for an entry that is no regular expression."""
    return re.match(entry[3:], name) is not None if entry.startswith("re:") else entry == name


def matcher(entries: Iterable[str]) -> Callable[[str], bool]:
    """Whether any of the entries hits a name; for many names."""
    listed = list(entries)
    exact = {entry for entry in listed if not entry.startswith("re:")}
    patterns = [re.compile(entry[3:]) for entry in listed if entry.startswith("re:")]
    return lambda name: name in exact or any(pattern.match(name) for pattern in patterns)
