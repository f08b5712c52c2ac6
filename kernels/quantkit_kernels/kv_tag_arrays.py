"""The arrays behind page tags, and what a line of the violation ring holds; kv_tags.py writes and checks them.

A tag has 32 bytes. Eight of them, the seal, lie in an array of their own and are all that a check reads; the other 24,
the record, say what the seal was made of, and are read where a seal is wrong, or a page travels.

Legend: P pages, R rows (requests), L logical pages of a row, B rows of a batch, N entries, K lines of the ring.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

GENERATION, OWNER, PLACE = range(3)  # columns of a record; PLACE: logical index | checksum << 32
PLACE_MASK = 0xFFFF_FFFF  # of the index in a place
FREE_INDEX = 0xFFFF_FFFF  # the logical index of a page that nobody holds
MOST_PAGES = 1 << 31  # of a pool: what a mark undoes to beyond is no page
# Seals that are no page's. Expected, where nothing passes, by
NEVER = 0  # a row that is not open
UNGRANTED = 1  # a logical page that an open row was not granted: no null page may stand there
PRUNED = 4  # pages that a window has left behind: a null page may stand there, and is not to be read
SHIFTED = 5  # a page whose first token is not in its first slot, by the table of a step
BEYOND = 6  # the last page that a step has looked at, of a row that has more
HOLE = 7  # a page of a row one of whose tokens was stored elsewhere, or that is a copy of what was not its source's
# and found, with the page's mark, by all who read there:
SPOILED = 2  # somebody has written there, or may, who does not hold it
UNARRIVED = 3  # it waits for a transfer, whose tag has not landed
FIRST_SEAL = 8  # of a page; one below it by chance, of 2^61, would be a violation
MARK = 0x51ED_2705  # what is added to a page before it is mixed into its seal

LINE_WORDS = 16


class State(IntEnum):
    """Of a page."""

    FREE = 0
    HELD = 1
    SHARED = 2  # held, and not to be written
    AWAITING = 3  # held, and a transfer may write there; so it may from here on
    STRUCK = 4  # and a token was stored there meanwhile: no tag that lands makes it right
    RESERVED = 5  # for a transfer, and for no row


class Check(IntEnum):
    """What was looked at when a line was written."""

    BEFORE_STEP = 1
    AFTER_STEP = 2
    WRITE = 3
    GRANT = 4
    RELEASE = 5
    HOLDER = 6  # who moves, caches or sends a page must hold it
    ARRIVAL = 7
    CONTENT = 8
    LANDING = 9  # nothing is on its way to a page that is handed on
    ANNOUNCEMENT = 10  # a transfer may write to what a row holds alone
    OPENING = 11  # a row is opened for one request at a time


class Word(IntEnum):
    """Columns of a line."""

    STEP = 0
    CHECK = 1
    ROW = 2  # -1 where none is known
    INDEX = 3
    PAGE = 4
    EXPECTED_SEAL = 5
    EXPECTED_GENERATION = 6
    EXPECTED_OWNER = 7
    FOUND_SEAL = 8
    FOUND_GENERATION = 9
    FOUND_OWNER = 10
    FOUND_PLACE = 11
    SLOT = 12  # of a write; -1 elsewhere
    DETAIL = 13  # the checksum that was computed; the position of a write; the state of what is announced
    OPENING = 14  # the number under which the row was opened; 0 where it is not open, or none is known


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTags:
    """Of every physical page of a pool, on its device."""

    seals_P: Tensor  # int64: of the record, marked with the page
    records_P3: Tensor  # int64
    states_P: Tensor  # int32: State

    @property
    def num_pages(self) -> int:
        return len(self.seals_P)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """What each row was granted; never made from the tags. A `HOLE` stands there for good, or until the next grant."""

    seals_RL: Tensor  # int64, without the mark of a page
    details_RL2: Tensor  # int64: generation, owner; read where a seal is wrong
    openings_R: Tensor  # int64: a number for each use of a row; 0: not open; read where a seal is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What a launched step reads, whatever becomes of its rows meanwhile."""

    pages_BL: Tensor  # int32
    seals_BL: Tensor  # int64
    openings_B: Tensor  # int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Lines of violations; ``count_1`` goes on where the ring is full, and a last line takes what has no room."""

    lines_KW: Tensor  # int64 [K + 1, LINE_WORDS]
    count_1: Tensor  # int64: all that ever were

    @property
    def num_lines(self) -> int:
        return len(self.lines_KW) - 1


def new_tags(num_pages: int, device: torch.device | str = "cpu") -> PageTags:
    """Nothing is sealed yet: who makes them seals all pages as free."""
    return PageTags(
        seals_P=torch.zeros(num_pages, dtype=torch.int64, device=device),
        records_P3=torch.zeros(num_pages, 3, dtype=torch.int64, device=device),
        states_P=torch.zeros(num_pages, dtype=torch.int32, device=device),
    )


def new_expectations(num_rows: int, most_pages: int, device: torch.device | str = "cpu") -> Expectations:
    """24 bytes for each logical page of each row, and 8 a row."""
    return Expectations(
        seals_RL=torch.zeros(num_rows, most_pages, dtype=torch.int64, device=device),
        details_RL2=torch.zeros(num_rows, most_pages, 2, dtype=torch.int64, device=device),
        openings_R=torch.zeros(num_rows, dtype=torch.int64, device=device),
    )


def new_captured(num_rows: int, most_pages: int, device: torch.device | str = "cpu") -> Captured:
    """12 bytes for each logical page of each row of a batch, and 8 a row."""
    return Captured(
        pages_BL=torch.zeros(num_rows, most_pages, dtype=torch.int32, device=device),
        seals_BL=torch.zeros(num_rows, most_pages, dtype=torch.int64, device=device),
        openings_B=torch.zeros(num_rows, dtype=torch.int64, device=device),
    )


def new_ring(num_lines: int, device: torch.device | str = "cpu") -> Ring:
    """128 bytes a line."""
    return Ring(
        lines_KW=torch.zeros(num_lines + 1, LINE_WORDS, dtype=torch.int64, device=device),
        count_1=torch.zeros(1, dtype=torch.int64, device=device),
    )
