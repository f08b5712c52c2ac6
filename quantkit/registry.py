"""Names that users write: one of a few words, or a key of a mapping that refuses duplicates and suggests near names."""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import TypeVar

from quantkit.errors import RecipeError, UsageError

Word = TypeVar("Word", bound=str | int)
Value = TypeVar("Value")


def one_of(option: str, word: str | int, words: Iterable[Word]) -> Word:
    """The one of ``words`` that ``word`` is. Raises UsageError for one that is none of them."""
    known = tuple(words)
    for one in known:
        if one == word:
            return one
    raise UsageError(f"{option} {word} is not known", remedy=f"choose {', '.join(map(str, known))}")


class Registry(Mapping[str, Value]):
    """``add`` is for our modules (a duplicate is a bug); look-up is for users (a miss is a RecipeError)."""

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._values: dict[str, Value] = {}

    def add(self, name: str, value: Value) -> Value:
        assert name not in self._values, f"{self.noun} {name!r} is registered twice"
        self._values[name] = value
        return value

    def __getitem__(self, name: str) -> Value:
        if name in self._values:
            return self._values[name]
        near = get_close_matches(name, self._values, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(self._values))}"
        raise RecipeError(f"unknown {self.noun} {name!r}", remedy=hint)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
