"""Where the tags of a transfer land: a place for each page, which is empty unless something has come."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.kv_guard.page_tags import PageTagTracker


class Inbox:
    """Seals and records, as they are sent; a seal of 0 is an empty place (one tag of 2^64 would look so).

    Where steps overlap a request may end while a step runs that was launched for it, and whose token is thrown away.
    Its pages are free then, and may be filled for another: that is no fault, but where the step stores its token.
    """

    BYTES_A_PAGE = 32

    def __init__(self, num_pages: int, num_rows: int, device: torch.device) -> None:
        self._seals_P = torch.zeros(num_pages, dtype=torch.int64, device=device)
        self._records_P3 = torch.zeros(num_pages, 3, dtype=torch.int64, device=device)
        self._num_launched = 0
        self._ended_R = torch.zeros(num_rows, dtype=torch.int64, device=device)  # how many were, when a row's ended

    @property
    def arrays(self) -> tuple[Tensor, Tensor]:
        """What a transfer writes to."""
        return self._seals_P, self._records_P3

    def launch(self) -> None:
        """Ahead of a step."""
        self._num_launched += 1

    def end(self, row: int) -> None:
        """At once, on the stream of whoever frees the row: he waits for it before another server is told of pages."""
        self._ended_R[row].fill_(self._num_launched)

    def empty(self, pages: Tensor) -> None:
        """Nothing that came before concerns who has the pages from here on."""
        self._seals_P.index_fill_(0, pages, 0)

    def take(self, pages: Tensor, tracker: PageTagTracker) -> None:
        """Put what came over the tags of pages, and empty their places. Where nothing came nothing changes."""
        self._put(pages, tracker)
        self.empty(pages)

    def take_late(self, tracker: PageTagTracker, rows: Tensor, slots: Tensor) -> None:
        """Put what came to pages that the launched step reads for ``rows``, and stores tokens in at ``slots``.

        Their transfers were taken when they were complete. What has come stays for who awaits it, if anybody does; not
        where a token was stored, perhaps behind it: there his transfer is one that has not arrived.
        """
        launched = tracker.launched_pages().view(len(rows), -1)
        goes_on = self._ended_R[rows.clamp(0, len(self._ended_R) - 1)] < self._num_launched
        stored = (slots // tracker.settings.size.page_size).clamp(0, len(self._seals_P) - 1)
        read = torch.where(goes_on[:, None], launched.clamp(min=0), 0)  # page 0, in place of none, holds nothing
        self._put(torch.cat((read.reshape(-1), stored)), tracker)
        self.empty(stored)

    def _put(self, pages: Tensor, tracker: PageTagTracker) -> None:
        seals = self._seals_P[pages]
        wire = torch.cat((seals[:, None], self._records_P3[pages]), 1)
        tracker.land(pages, torch.where((seals != 0)[:, None], wire, tracker.lift(pages)))


def buffers_of(arrays: Sequence[Tensor]) -> tuple[list[int], list[int], list[int]]:
    """Pointers, bytes, and bytes a page."""
    return (
        [array.data_ptr() for array in arrays],
        [array.nbytes for array in arrays],
        [array[0].nbytes for array in arrays],
    )
