"""What can be wrong with a page, in words, and when it is seen. Without torch, for who reads incidents."""

from collections.abc import Mapping
from enum import StrEnum

from quantkit.kv_guard.names import one_line


class Fault(StrEnum):
    """What is wrong with a page, in the words of metrics and incidents."""

    NEVER_GRANTED = "never_granted"
    OUTSIDE_POOL = "outside_pool"
    FREED = "freed"
    GRANTED_ANEW = "granted_anew"
    OTHER_OWNER = "other_owner"
    MISPLACED = "misplaced"
    SHIFTED = "shifted"
    BEYOND = "beyond"
    HOLE = "hole"
    OTHER_PAGE = "other_page"
    TORN = "torn"
    GRANTED_TWICE = "granted_twice"
    LANDING = "landing"
    FREED_TWICE = "freed_twice"
    WRITE_TO_SHARED = "write_to_shared"
    WRITE_OUT_OF_PLACE = "write_out_of_place"
    SPOILED = "spoiled"
    NOT_ARRIVED = "not_arrived"
    CONTENT = "content"
    ROW_TAKEN = "row_taken"


MEANING: Mapping[Fault, str] = {
    Fault.NEVER_GRANTED: "the row was never granted a page for this place, or its window has left it",
    Fault.OUTSIDE_POOL: "the page table names a page that the pool does not have",
    Fault.FREED: "the page was released while the row still had it",
    Fault.GRANTED_ANEW: "the page was released and granted again for the same prefix: its content may be half written",
    Fault.OTHER_OWNER: "the page is another prefix's: it was released and granted again, or the row is not its own",
    Fault.MISPLACED: "the page is the row's own and stands at another place",
    Fault.SHIFTED: "the row is shifted within its pages: one's first token is not in its first slot",
    Fault.BEYOND: "the row has more pages than the engine said that a step reads: what lies behind was not looked at",
    Fault.HOLE: "a token of this page was stored elsewhere, or the page is a copy of what was not its source's",
    Fault.OTHER_PAGE: "the tag is that of another page: a copy, a move or a transfer brought it here",
    Fault.TORN: "the tag agrees with no page: it was overwritten in part",
    Fault.GRANTED_TWICE: "the page was granted while it was held: it stood in the free list twice",
    Fault.LANDING: "a transfer to a former holder of the page may still write there",
    Fault.FREED_TWICE: "the page was released while it was free",
    Fault.WRITE_TO_SHARED: "a token would be stored in a page that others read",
    Fault.WRITE_OUT_OF_PLACE: "a token would be stored at another offset than that of its position",
    Fault.SPOILED: "somebody who does not hold the page has written there, or may",
    Fault.NOT_ARRIVED: "the transfer to the page has not come: nothing that was sent lies there yet",
    Fault.CONTENT: "the content has another checksum than it left with",
    Fault.ROW_TAKEN: "the row was opened for a request while it was another's: both are named",
}

MOMENTS: Mapping[str, str] = {
    "before_step": "before the step",
    "after_step": "after the step",
    "write": "on the write side",
    "grant": "at the grant",
    "release": "at the release",
    "landing": "when a page was handed on",
    "announcement": "when a transfer was announced",
    "opening": "when a row was opened",
    "holder": "at the source of a copy",
    "arrival": "at the arrival of a copy",
    "content": "by the checksum at arrival",
}
"""When a check speaks. All of them are read with the step's result, before its tokens are released."""


def in_words(fault: Fault, request: str | None, row: int | None, page: str, *, separator: str = ", ") -> str:
    """Who, where and what, on one line whatever the request is called; ``page`` as the reader names it."""
    who = "no request" if request is None else f"request {one_line(request)}"
    where = f"row {row}" if fault is Fault.ROW_TAKEN else page
    return f"{who}{separator}{where}: {MEANING[fault]}"
