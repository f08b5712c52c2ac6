"""What a dumped pool would have made the guard say, and which of its tags are not what they should be."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.kv_guard.dispatch import FREE_INDEX, PLACE_MASK, SPOILED, UNARRIVED, State, new_ring, twins
from quantkit.kv_guard.dump import Dump
from quantkit.kv_guard.violations import Violation, read_line


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpReport:
    """``torn``, ``spoiled`` and ``stray`` are pages: whose seal is not that of their record, which somebody wrote who
    did not hold it, and whole ones of nobody that is known. ``num_awaiting``: held, and a transfer may write them."""

    num_held: int
    num_awaiting: int
    num_shared: int
    num_free: int
    num_checked: int
    violations: tuple[Violation, ...]
    torn: tuple[int, ...]
    spoiled: tuple[int, ...]
    stray: tuple[int, ...]

    @property
    def is_sound(self) -> bool:
        """Stray pages are a leak or a node's own: no request reads them, nor a spoiled page that is no violation."""
        return not (self.violations or self.torn)

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "pages": {
                "held": self.num_held,
                "awaiting": self.num_awaiting,
                "shared": self.num_shared,
                "free": self.num_free,
            },
            "checked": self.num_checked,
            "violations": [one.document() for one in self.violations],
            "torn": list(self.torn),
            "spoiled": list(self.spoiled),
            "stray": list(self.stray),
        }


def check_dump(dump: Dump) -> DumpReport:
    """All pages of the batch as the guard checks them, and every tag against itself."""
    step, size = dump.step, dump.size
    ring = new_ring(max(len(step.rows) * step.most_pages, 1))
    twins.check_pages(
        dump.tags,
        dump.expectations,
        ring,
        step.table,
        step.rows,
        step.lengths,
        step.firsts,
        page_size=size.page_size,
        by_token=step.by_token,
        most_pages=step.most_pages,
        step=0,
        null_page=size.null_page,
    )
    lines = ring.lines_KW[: int(ring.count_1[0])].tolist()
    pages = torch.arange(size.num_pages)
    is_free = (dump.tags.records_P3[:, 2] & PLACE_MASK) == FREE_INDEX
    is_whole = dump.tags.seals_P == twins.record_seals(dump.tags.records_P3) ^ twins.mark_of(pages)
    unmarked = dump.tags.seals_P ^ twins.mark_of(pages)
    is_spoiled = unmarked == SPOILED
    states_P = dump.tags.states_P
    is_known = (states_P >= State.FREE) & (states_P <= max(State))
    is_awaiting = is_known & (states_P >= State.AWAITING)
    is_waiting = is_awaiting | ((unmarked == UNARRIVED) & (states_P != State.FREE))
    is_torn = ~is_spoiled & ~is_waiting & (~is_whole | ~is_known | (is_free != (states_P == State.FREE)))
    expected = set(dump.expectations.seals_RL.flatten().tolist())
    found, states = unmarked.tolist(), Counter(states_P.tolist())
    return DumpReport(
        num_held=states[State.HELD] + int(is_awaiting.sum()),
        num_awaiting=int(is_awaiting.sum()),
        num_shared=states[State.SHARED],
        num_free=states[State.FREE],
        num_checked=int(((step.lengths + size.page_size - 1) // size.page_size).sum()),
        violations=tuple(
            read_line(line, dump.names, num_pages=size.num_pages, page_size=size.page_size) for line in lines
        ),
        torn=tuple(pages[is_torn].tolist()),
        spoiled=tuple(pages[is_spoiled].tolist()),
        stray=tuple(
            page
            for page in pages[(states_P == State.HELD) & ~is_torn & ~is_spoiled].tolist()
            if found[page] not in expected
        ),
    )
