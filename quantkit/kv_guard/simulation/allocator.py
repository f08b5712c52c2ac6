"""The engine's own books: free pages, and the page table of its rows. They believe what they are told."""

from collections import deque
from collections.abc import Callable, Sequence

import torch

from quantkit.kv_guard.simulation.shapes import EngineShape

NULL_PAGE = 0


class FreePages:
    """A list of free pages, first come first served; while a group is open, releases are put off until it ends."""

    def __init__(self, num_pages: int, tell_released: Callable[[Sequence[int]], None]) -> None:
        self._tell_released = tell_released
        self._group: list[int] | None = None
        self.free: deque[int] = deque()
        self.fill(num_pages)

    def fill(self, num_pages: int) -> None:
        """All are free, but for the null page."""
        self.free = deque(range(NULL_PAGE + 1, num_pages))
        self._group = None

    def take(self, count: int) -> list[int] | None:
        """None where there are too few."""
        if count > len(self.free):
            return None
        return [self.free.popleft() for _ in range(count)]

    def put(self, pages: Sequence[int]) -> None:
        """They are released now, or with the group. A page that is named twice is free twice."""
        if self._group is not None:
            self._group.extend(pages)
        elif pages:
            self._tell_released(pages)
            self.free.extend(pages)

    def begin_group(self) -> None:
        self._group = []

    def end_group(self) -> None:
        pages, self._group = self._group or [], None
        self.put(pages)

    def prefer(self, pages: Sequence[int]) -> None:
        """Those of them that are free are taken next, in their order."""
        wanted = [page for page in pages if page in self.free]
        for page in reversed(wanted):
            self.free.remove(page)
            self.free.appendleft(page)


class RowTable:
    """A row a request; row 0 is that of padding. What was written reaches the device with the next step."""

    def __init__(self, shape: EngineShape) -> None:
        self._shape = shape
        width = shape.most_pages * (shape.page_size if shape.by_token else 1)
        self.table = torch.zeros(shape.num_rows, width, dtype=torch.int32)
        self.losing: set[tuple[int, int]] = set()  # rows and logical pages whose entry is not written: a fault
        self.lost: dict[tuple[int, int], int] = {}  # those that were not, and the pages
        self._written: dict[tuple[int, int], int] = {}
        self.fill()

    def fill(self) -> None:
        """All rows are free; what stood there stays."""
        self.free = list(range(self._shape.num_rows - 1, 0, -1))
        self.losing.clear()
        self.lost.clear()
        self._written.clear()

    def write(self, row: int, first: int, pages: Sequence[int]) -> None:
        """Pages of a row from logical page ``first`` on."""
        for index, page in enumerate(pages, first):
            if (row, index) in self.losing:
                self.losing.discard((row, index))
                self.lost[row, index] = page
            else:
                self._written[row, index] = page

    def written(self) -> Callable[[], None] | None:
        """What the device has to do to see it all."""
        if not self._written:
            return None
        rows, indices = (torch.tensor(part) for part in zip(*self._written, strict=True))
        pages = torch.tensor(list(self._written.values()), dtype=torch.int32)
        self._written.clear()
        return lambda: self.put_entries(rows, indices, pages)

    def put_entries(self, rows: torch.Tensor, indices: torch.Tensor, pages: torch.Tensor) -> None:
        """As the device does it, now: int64 [N] each, pages of any integers."""
        if self._shape.by_token:
            of_page = torch.arange(self._shape.page_size)
            rows, indices = rows[:, None], indices[:, None] * self._shape.page_size + of_page
            pages = pages[:, None] * self._shape.page_size + of_page
        self.table[rows, indices] = pages.to(torch.int32)

    def entry(self, row: int, index: int) -> int:
        """The page that the device sees now."""
        if self._shape.by_token:
            return int(self.table[row, index * self._shape.page_size]) // self._shape.page_size
        return int(self.table[row, index])
