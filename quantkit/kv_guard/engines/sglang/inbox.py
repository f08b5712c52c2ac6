"""Where the tags of a transfer land: a place for each page, which is empty unless something has come."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.kv_guard.page_tags import PageTagTracker


class Inbox:
    """Seals and records, as they are sent; a seal of 0 is an empty place (one tag of 2^64 would look so)."""

    def __init__(self, num_pages: int, device: torch.device) -> None:
        self._seals_P = torch.zeros(num_pages, dtype=torch.int64, device=device)
        self._records_P3 = torch.zeros(num_pages, 3, dtype=torch.int64, device=device)

    @property
    def arrays(self) -> tuple[Tensor, Tensor]:
        """What a transfer writes to."""
        return self._seals_P, self._records_P3

    def empty(self, pages: Tensor) -> None:
        """Nothing that came before concerns who has the pages from here on."""
        self._seals_P.index_fill_(0, pages, 0)

    def take(self, pages: Tensor, tracker: PageTagTracker) -> None:
        """Put what came over the tags of pages, and empty their places. Where nothing came nothing changes."""
        seals = self._seals_P[pages]
        wire = torch.cat((seals[:, None], self._records_P3[pages]), 1)
        tracker.land(pages, torch.where((seals != 0)[:, None], wire, tracker.lift(pages)))
        self.empty(pages)

    def take_late(self, tracker: PageTagTracker) -> None:
        """The same, of the pages that the launched step reads: their transfers were taken when they were complete."""
        self.take(tracker.launched_pages().clamp(min=0), tracker)  # page 0, in place of none, holds nothing


def buffers_of(arrays: Sequence[Tensor]) -> tuple[list[int], list[int], list[int]]:
    """Pointers, bytes, and bytes a page."""
    return (
        [array.data_ptr() for array in arrays],
        [array.nbytes for array in arrays],
        [array[0].nbytes for array in arrays],
    )
