"""What an engine calls: a tracker that does nothing, and the one that tags pages (`page_tags.py`).

An engine asks for ``is_on`` once, where it would gather what a call needs; the tracker that does nothing is never asked
for more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from quantkit.errors import QuantkitError

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.kv_guard.identity import Chains
    from quantkit.kv_guard.metrics import Metrics
    from quantkit.kv_guard.violations import Violation


READ_CHECKS = frozenset({"before_step", "after_step"})  # of what a step that was launched reads
STEP_CHECKS = READ_CHECKS | {"write"}


class Mode(StrEnum):
    """What follows a violation."""

    OFF = "off"
    LOG = "log"
    ABORT = "abort"
    HALT = "halt"

    @property
    def is_strict(self) -> bool:
        """Whether a server must not run unguarded."""
        return self in (Mode.ABORT, Mode.HALT)


class KvGuardError(QuantkitError):
    """A KV page was not what its request was granted, and the guard was told to halt; or the guard cannot guard."""

    exit_code = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What was granted, as a cache of prefixes keeps it beside its pages; int64 [N] on the pool's device."""

    generations: "Tensor"
    owners: "Tensor"
    indices: "Tensor"

    def __getitem__(self, part: slice) -> "Held":
        """As a node of a radix tree is split."""
        return Held(generations=self.generations[part], owners=self.owners[part], indices=self.indices[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A batch that is about to run; tensors on the pool's device.

    ``table`` [rows, entries] int32 or int64 names a page an entry or, with ``by_token``, the slot of each token.
    Its page is read from the first of these, which must be the page's first slot. ``rows`` and ``lengths`` [B] are its
    rows and their tokens. ``firsts`` [B] are the first pages that the kernel reads, as behind a window: from there on a
    null page is read as data, and is a violation. Where they are None it is padding wherever a row that is pruned
    expects nothing. In rows that nobody has opened null pages are padding in any case.
    ``most_pages`` is the longest of them in pages, known without asking the device; a longer one is a violation.
    ``is_steady``: nothing may write these rows of the table while the step runs, so that they are read again behind it.
    """

    table: "Tensor"
    rows: "Tensor"
    lengths: "Tensor"
    most_pages: int
    firsts: "Tensor | None" = None
    by_token: bool = False
    is_steady: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one step: ``lost`` violations had no room in the ring; ``aborted`` are the requests to end, by name.

    Where violations were lost these are all that were open. Steps ahead whose verdict was not asked for add theirs.
    """

    step: int
    violations: tuple["Violation", ...] = ()
    lost: int = 0
    aborted: tuple[str, ...] = ()


class Tracker(Protocol):
    """Pages, rows, indices and owners are int64 [N] tensors on the pool's device; nothing waits for it.

    Each operation is one event in a page's life, told when it happens and in the order of the stream that runs the
    model. ``owners`` are `identity.owner_of` of the chains up to the pages' ends.

    A transfer is in no such order. Whoever writes into a pool beside its stream is told of pages only when the stream
    has passed their `grant` or `reserve`: before that a step may still read what was there, and the tag that lands
    would be written over.

    The plugins call no `move`, `fork`, `copied`, `truncate`, `prune`, `reserve`, `send`, `sent`, `store` or `settle`.
    They set no `Step.is_steady` and pass no checksums: what these are for their engines do not do, or it is refused.
    """

    is_on: bool

    @property
    def chains(self) -> "Chains":
        """Under the pool's key: what owners are made of."""

    @property
    def metrics(self) -> "Metrics":
        """Of the verdicts that were read."""

    def open(self, row: int, request: str) -> None:
        """A request begins in a row, which expects nothing yet. A row that was not closed is a violation of both."""

    def close(self, row: int) -> None:
        """The request of a row has ended; its pages are released on their own."""

    def grant(
        self,
        pages: "Tensor",
        rows: "Tensor",
        indices: "Tensor",
        owners: "Tensor",
        first_generation: int | None = None,
    ) -> None:
        """The allocator hands out free pages. One that lives in another process counts the grants itself, and names
        the first."""

    def release(self, pages: "Tensor") -> None:
        """Pages go back to the free list: really, not when their release is decided or put off."""

    def cache(self, pages: "Tensor", rows: "Tensor", indices: "Tensor") -> Held:
        """A row's pages become readable by others, and are written no more. Keep what is returned with the node."""

    def share(self, rows: "Tensor", indices: "Tensor", held: Held) -> None:
        """A row begins with cached pages: it expects what the node kept, whatever lies there by now."""

    def move(self, sources: "Tensor", targets: "Tensor", rows: "Tensor", indices: "Tensor") -> None:
        """The content of pages was copied to free ones, and the sources are given up. Who shares them is told anew."""

    def fork(self, row: int, to_row: int, pages: "Tensor") -> None:
        """Another row reads the first pages of a row, which they must be, and neither writes them any more."""

    def copied(self, sources: "Tensor", rows: "Tensor", indices: "Tensor", to_rows: "Tensor") -> None:
        """Rows' pages were copied for other rows, as where a fork writes on: they must have been the former's."""

    def truncate(self, rows: "Tensor", num_pages: "Tensor") -> None:
        """Rows keep their first ``num_pages`` [N]: speculated tokens were refused, or a request was retracted."""

    def prune(self, rows: "Tensor", firsts: "Tensor") -> None:
        """Rows need their pages from ``firsts`` [N] on: a window has left the others, where null pages may stand."""

    def clear(self) -> None:
        """Every page is free and every row empty, as after a flush of the cache."""

    def announce(self, pages: "Tensor", transfer: int) -> None:
        """Granted pages are a transfer's: it may write there until `arrive`, or until it is `drained`.

        Whoever reads or passes them on before is a violation: nothing has come there yet; so is a page that is free,
        that others read, or that another transfer was announced for. ``transfer`` is a number of the caller's, 0 or
        above; no two that are not over have the same. A page's part of it is over once.
        """

    def drained(self, pages: "Tensor", transfer: int) -> None:
        """A transfer was given up, and nothing of it is on its way to pages any more: they may be released.

        Those to which nothing has come are their row's as before the announcement, which may compute them itself.

        Told only after the pages were released it still ends that every later holder of them is a violation, unless
        another transfer to a former holder is not over yet.
        """

    def forget_transfers(self, pages: "Tensor") -> None:
        """Those to former holders count as over, as where nobody will ever say that they are."""

    def reserve(self, pages: "Tensor", transfer: int) -> None:
        """Free pages are taken for no row, and announced: a copy will arrive there, see `store`."""

    def send(self, pages: "Tensor", held: Held, checksums: "Tensor | None" = None) -> "Tensor":
        """Tags that travel beside pages, int64 [N, 4]; who sends names what it holds, and what the content sums to."""

    def lift(self, pages: "Tensor") -> "Tensor":
        """What a transfer reads beside the pages, when it reads them: the tags that lie there, whosever they are."""

    def land(self, pages: "Tensor", tags: "Tensor") -> None:
        """What a transfer does that brings tags along with the pages: it overwrites those that lie there.

        Tags are written twice, before and after the content. The first makes sure that nobody reads late content
        without finding its tag. The second marks content that arrives after a release, even where the page was granted
        again in between. Whoever says that a transfer has arrived has waited for the second: one that lands after
        `arrive` fails the next check. An engine that cannot order the two sends one.
        """

    def sent(self, pages: "Tensor", held: Held) -> None:
        """A transfer has read the pages: they must be what was sent until now."""

    def holds(self, pages: "Tensor", rows: "Tensor", indices: "Tensor") -> "Tensor":
        """Which pages are what rows hold there, bool [N], as where they leave the pool without their tags.

        Each that is not is a violation without a name, since who asks has it at hand.
        """

    def arrive(self, pages: "Tensor", rows: "Tensor", indices: "Tensor", checksums: "Tensor | None" = None) -> None:
        """A transfer to a row's pages is said to be complete: what landed must be what the row expects."""

    def store(self, pages: "Tensor", held: Held, checksums: "Tensor | None" = None) -> Held:
        """A copy to reserved pages is said to be complete, as in the host's memory; a node keeps what is returned.

        ``held`` is what was sent: what landed must have its owners and indices. It is written no more.
        """

    def own_pages(self, row: int, first: int, count: int) -> "Tensor":
        """Of ``count`` logical pages of a row from ``first`` on: the pages that were granted for them, -1 for none.

        Asked when a request is ended because of its row: what it gives back must not be another's. Pages that a node
        of a cache holds, or a fork, are before ``first``. Waits for the device.
        """

    def before_step(self, step: Step) -> int:
        """Check all pages that a batch will read; returns the number of the step.

        Raises KvGuardError for sizes that were not said, and where `after_step` of the step ahead was not called.
        """

    def launched_pages(self) -> "Tensor":
        """Those that the step reads which `before_step` has launched, int64; -1 stands for none."""

    def check_writes(self, slots: "Tensor", rows: "Tensor", positions: "Tensor") -> None:
        """Check where a batch will store its tokens; slots below 0 are padding.

        The step runs all the same: a page where a token does not belong is spoiled, and fails for all who read it.
        """

    def after_step(self) -> None:
        """Check the same pages behind the step, as they were at its launch."""

    def verdict(self, step: int) -> Verdict:
        """Of a step whose result is at hand, before its tokens are released.

        Where the verdict of an earlier step was never asked for, the requests that it named are added to the next one.
        """

    def settle(self) -> Verdict:
        """Of all since the last step: for a pool that runs none, as the host's memory. Waits for the device."""


class NullTracker:
    """The default: every call of an engine's is behind ``is_on``, and one that is not is a bug."""

    is_on = False
    __slots__ = ()

    @property
    def chains(self) -> NoReturn:
        self._never()

    @property
    def metrics(self) -> NoReturn:
        self._never()

    def _never(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("nothing is guarded: ask for is_on first")

    open = close = grant = release = cache = share = move = fork = copied = truncate = prune = clear = _never
    announce = drained = forget_transfers = reserve = send = lift = land = sent = holds = arrive = store = _never
    own_pages = before_step = launched_pages = check_writes = after_step = verdict = settle = _never


def aborted_requests(
    violations: Sequence["Violation"], mode: Mode, *, lost: int, requests: Iterable[str]
) -> tuple[str, ...]:
    """Each once, in the order of their lines; all ``requests`` where a line was lost, or a step reads a row that is
    nobody's: its tokens may be any's."""
    if mode is not Mode.ABORT:
        return ()
    named = [one.request for one in violations if one.request is not None]
    nobodys = [one for one in violations if one.request is None]
    is_anybodys = lost or any(one.check in READ_CHECKS for one in nobodys)  # padding may write: its victim is named
    return tuple(dict.fromkeys(named + (list(requests) if is_anybodys else [])))
