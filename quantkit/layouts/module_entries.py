"""Entries of a config that hit modules: patterns where they hit nothing else, exact names where no pattern can.

They cover the names in the files and those of modules that engines fuse.
"""

import bisect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from quantkit.module_names import layer_of
from quantkit.patterns import is_matched, matcher

_SAME_DIGITS = str.maketrans("123456789", "000000000")
_NO_DIGITS = str.maketrans("", "", "0123456789")


def entries_of(
    modules: Sequence[str],
    *,
    others: Sequence[str],
    patterns: Sequence[str],
    fused: Mapping[str, Sequence[str]],
) -> list[str]:
    """Entries that hit the modules, in the files and as engines fuse them, and none of ``others``.

    Those of ``patterns`` that hit none of these come first; what is then uncovered is named.
    """
    examples = _examples(others)  # enough, since the patterns of a family name no numbers
    kept = [entry for entry in patterns if not any(is_matched(entry, name) for name in examples)]
    is_covered = matcher(kept)
    return kept + _entries([module for module in modules if not is_covered(module)], others, fused)


def needed(patterns: Sequence[str], modules: Sequence[str]) -> list[str]:
    """The patterns that hit one of the modules."""
    examples = _examples(modules)
    return [pattern for pattern in patterns if any(is_matched(pattern, one) for one in examples)]


def _entries(modules: Sequence[str], others: Sequence[str], fused: Mapping[str, Sequence[str]]) -> list[str]:
    """One pattern for a module of every layer, where it hits none of ``others``; else the exact name, with a ``re:``
    twin that any prefix matches unless that hits one. Fused names that contain the module come along."""
    if not modules:
        return []
    examples, is_suffix = _examples(others), _suffix_finder(others)
    is_clean: dict[str, bool] = {}
    entries: dict[str, None] = {}
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        pattern = _pattern_of(module)
        if pattern not in is_clean:
            is_clean[pattern] = bool(pattern) and not any(is_matched(pattern, one) for one in examples)
        for name in (leaf, *fused.get(leaf, ())):
            full = f"{parent}.{name}" if parent else name
            if is_clean[pattern]:
                entries[_pattern_of(full)] = None
                continue
            entries[full] = None
            if not is_suffix(full):
                entries[f"re:.*{re.escape(full)}$"] = None
    return list(entries)


def _pattern_of(module: str) -> str:
    """For the module of every layer; empty for one that lies in none, or has another number, which examples hide."""
    layer = layer_of(module)
    tail = "" if layer is None else layer.rest
    return rf"re:.*\.{re.escape(tail)}$" if tail and tail == tail.translate(_NO_DIGITS) else ""


def _suffix_finder(names: Iterable[str]) -> Callable[[str], bool]:
    """Whether any of the names ends with a text, in logarithmic time."""
    reversed_names = sorted(name[::-1] for name in names)

    def is_suffix(text: str) -> bool:
        place = bisect.bisect_left(reversed_names, text[::-1])
        return place < len(reversed_names) and reversed_names[place].startswith(text[::-1])

    return is_suffix


def _examples(names: Iterable[str]) -> list[str]:
    """One of each name up to its digits: patterns see 60,000 experts through a handful."""
    found: dict[str, str] = {}
    for name in names:
        found.setdefault(name.translate(_SAME_DIGITS), name)
    return list(found.values())
