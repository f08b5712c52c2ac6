"""Who reads what a request gave to the prefix cache: what it computed from another's pages is another's, too.

A request is found wrong when the result of its step is read. By then it may have put what that step computed into the
cache, between two chunks of its prompt, and others may have begun behind it.
"""

from collections.abc import Iterable, Sequence


class Readers:
    """By rows that are open; entries are those of `kept_pages.KeptPages`, which end no sooner than their readers."""

    def __init__(self) -> None:
        self.step = -1  # that was launched last
        self._requests: dict[int, str] = {}
        self._given: dict[int, list[tuple[int, Sequence[int]]]] = {}
        self._read: dict[int, set[int]] = {}

    def open(self, row: int, request: str) -> None:
        """It has given and read nothing yet."""
        self._requests[row], self._given[row], self._read[row] = request, [], set()

    def close(self, row: int) -> None:
        """What it has given stays given."""
        for part in (self._requests, self._given, self._read):
            part.pop(row, None)

    def give(self, row: int, entries: Sequence[int]) -> None:
        """A row's pages become the cache's."""
        self._given[row].append((self.step, entries))

    def read(self, row: int, entries: Iterable[int]) -> None:
        """A row has pages of the cache."""
        self._read[row].update(entries)

    def behind(self, requests: Iterable[str], step: int) -> tuple[set[int], set[str]]:
        """Entries that were given since a step was launched, by ``requests`` or by who has read of these; and those
        readers. What was given before it is as it was."""
        wrong = set(requests)
        rows = [row for row, request in self._requests.items() if request in wrong]
        entries: set[int] = set()
        readers: set[str] = set()
        while rows:
            row = rows.pop()
            found = {entry for since, some in self._given[row] if since >= step for entry in some} - entries
            entries |= found
            for other, request in self._requests.items():
                if request not in wrong | readers and not found.isdisjoint(self._read[other]):
                    readers.add(request)
                    rows.append(other)
        return entries, readers
