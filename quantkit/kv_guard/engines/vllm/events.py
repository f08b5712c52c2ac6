"""What travels between a scheduler and its workers: plain numbers, pickled with vLLM's own messages."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

EVENTS = "quantkit_kv_guard"  # the attribute of a SchedulerOutput and of a ModelRunnerOutput
_SIGN, _WORD = 1 << 63, 1 << 64


def _columns(count: int) -> list["array[int]"]:
    return [array("q") for _ in range(count)]


@dataclass(slots=True, kw_only=True)
class GroupEvents:
    """Of one group of layers. Each list holds columns of int64, an entry an event; generations and owners as bits."""

    cached: list["array[int]"] = field(default_factory=lambda: _columns(3))  # pages, rows, indices
    released: list["array[int]"] = field(default_factory=lambda: _columns(1))  # pages
    granted: list["array[int]"] = field(default_factory=lambda: _columns(4))  # pages, rows, indices, owners
    shared: list["array[int]"] = field(default_factory=lambda: _columns(4))  # rows, indices, generations, owners
    first_generation: int = 0  # of what is granted; the others follow

    def columns(self) -> Iterator["array[int]"]:
        """In the order in which a worker takes them."""
        for kind in (self.cached, self.released, self.granted, self.shared):
            yield from kind


@dataclass(slots=True, kw_only=True)
class StepEvents:
    """What has become of pages since the step before. A worker does it in this order, before the step reads a page:

    pages were cached, rows closed, pages released, rows opened, pages granted, cached pages shared.
    """

    number: int  # of the step, from 0 on: none may be left out
    closed: list[int]
    opened: list[tuple[int, str]]  # row, request
    groups: list[GroupEvents]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBad:
    """From where on a request's pages are not to be trusted."""

    request: str
    group: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BadGrant:
    """A page that does not hold what it was granted for, as it was granted: when the report is read, it may be
    another's."""

    group: int
    page: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a worker saw of a step. ``ended`` are the requests to end; empty where the mode says so."""

    ended: tuple[str, ...] = ()
    first_bad: tuple[FirstBad, ...] = ()
    bad_grants: tuple[BadGrant, ...] = ()

    def together(self, other: "StepReport") -> "StepReport":
        """Of two groups of layers, or of two ranks."""
        return StepReport(
            ended=tuple(dict.fromkeys(self.ended + other.ended)),
            first_bad=tuple(dict.fromkeys(self.first_bad + other.first_bad)),
            bad_grants=tuple(dict.fromkeys(self.bad_grants + other.bad_grants)),
        )


def signed(bits: int) -> int:
    """64 bits as int64."""
    return (bits + _SIGN) % _WORD - _SIGN


def generation_after(generation: int) -> int:
    """As `PageTagTracker` and its kernels count: 0 is left out."""
    return generation + 1 if generation + 1 < _WORD else 1


def add(columns: list["array[int]"], *values: int) -> None:
    """An entry."""
    for column, value in zip(columns, values, strict=True):
        column.append(value)
