"""Who has a row, and who had it: each use of a row has a number, which the lines of the ring bear."""

from collections.abc import Mapping


class Openings:
    """A line says under which opening its row was when the device came to it: a row that was closed and opened anew
    within a step is not taken for its next request's, nor for its former one's."""

    def __init__(self) -> None:
        self._count = 0
        self._rows: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._ended: list[int] = []  # since the last snapshot, whose lines may speak of them

    @property
    def by_row(self) -> Mapping[int, str]:
        """Of rows that are open."""
        return {row: self._names[opening] for row, opening in self._rows.items()}

    def open(self, row: int, request: str) -> tuple[int, int]:
        """Numbers from 1 on: of the opening that was not closed, 0 if there is none, and of this one."""
        former = self._rows.get(row, 0)
        self.close(row)
        self._count += 1
        self._rows[row] = self._count
        self._names[self._count] = request
        return former, self._count

    def close(self, row: int) -> None:
        """A row that is not open stays so."""
        if row in self._rows:
            self._ended.append(self._rows.pop(row))

    def clear(self) -> None:
        """Of all rows."""
        self._ended += self._rows.values()
        self._rows.clear()

    def take(self) -> Mapping[int, str]:
        """Names, by opening, of all that were open since the last time."""
        names = dict(self._names)
        for opening in self._ended:
            del self._names[opening]
        self._ended.clear()
        return names
