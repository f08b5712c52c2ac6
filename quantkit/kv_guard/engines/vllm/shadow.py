"""What the allocator did, as a scheduler's process sees it: grants, who expects which, and what workers must be told.

A grant is one handing out of a page. It is in force until its page is released, and idle while the page is cached and
no request has it: vLLM may take such a page into use again, content and all, so that a page of the cache is released
when it is handed out anew, and any other when its last request gives it up. Whoever reads a page expects a grant, as an
object, never what the page holds by now: a page that was stolen on the way still has its former grant in the reader's
list.
"""

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from quantkit.kv_guard.engines.vllm.events import BadGrant, GroupEvents, StepEvents, add, generation_after, signed
from quantkit.kv_guard.identity import Chain, Chains, owner_of
from quantkit.kv_guard.tracker import KvGuardError

HashOf = Callable[[int], bytes | None]
"""The engine's hash of all tokens up to the end of a logical page, None while they are not known."""


@dataclass(slots=True, eq=False)
class Grant:
    """``generation`` is 0 until workers were told."""

    page: int
    group: int
    request: str  # that it was handed out for; others may read it
    owner: int
    generation: int = 0
    in_force: bool = True
    is_idle: bool = False


@dataclass(frozen=True, slots=True)
class Cached:
    """Under which hash a page can be found, and as what."""

    engine_hash: bytes
    grant: Grant


@dataclass(slots=True, eq=False)
class Holding:
    """A request's pages, by group; None where the engine has its null page. ``sent``: how many workers know."""

    request: str
    groups: list[list[Grant | None]]
    sent: list[int]
    row: int | None = None


@dataclass(slots=True)
class Marked:
    """A page of a request that others may read from here on."""

    holding: Holding
    group: int
    index: int
    grant: Grant


@dataclass(slots=True)
class Shadow:
    """Of one block pool. ``chains`` are those of each group, ``num_rows`` what every worker has."""

    chains: Sequence[Chains]
    num_rows: int
    marks_cached: bool
    next_generations: list[int] = field(default_factory=list)
    holdings: dict[str, Holding] = field(default_factory=dict)
    _left: deque[tuple[int, Holding]] = field(default_factory=deque)  # by the step that was next when they left
    _grants: dict[int, Grant] = field(default_factory=dict)  # the last of each page
    _cached: dict[int, Cached] = field(default_factory=dict)
    _handed_out: set[int] = field(default_factory=set)  # and not yet in a request's list
    _marked: list[Marked] = field(default_factory=list)  # since the last step was told of
    _due: list[Marked] = field(default_factory=list)  # and before that: their tokens are written
    _closing: list[Holding] = field(default_factory=list)
    _free_rows: list[int] = field(default_factory=list)
    _number: int = 0
    _events: list[GroupEvents] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.next_generations = [secrets.randbits(64) or 1 for _ in self.chains]
        self._free_rows = list(range(self.num_rows - 1, -1, -1))
        self._events = [GroupEvents() for _ in self.chains]

    def hand_out(self, pages: Iterable[int]) -> None:
        """The pool gave pages away; for whom `extend` will tell."""
        for page in pages:
            grant = self._grants.get(page)
            if grant is not None and grant.in_force and grant.is_idle:
                self._release(grant)
            self._cached.pop(page, None)
            self._handed_out.add(page)

    def take_up(self, page: int) -> None:
        """A cached page is in use."""
        if page in self._grants:
            self._grants[page].is_idle = False

    def give_up(self, page: int, *, is_cached: bool) -> None:
        """Nobody has a page any more."""
        if page in self._handed_out:
            self._handed_out.discard(page)
            return
        grant = self._grants.get(page)
        if grant is None or not grant.in_force or grant.is_idle:
            self.give_up_again(page)
        elif is_cached:
            grant.is_idle = True
        else:
            self._release(grant)

    def give_up_again(self, page: int) -> None:
        """A page was given up that nobody has: workers are told of a release too many, and whoever reads it fails."""
        grant = self._grants.get(page)
        if grant is not None and grant.in_force:
            self._release(grant)
        add(self._events[grant.group if grant is not None else 0].released, page)

    def cache(self, request: str, group: int, index: int, page: int, engine_hash: bytes) -> None:
        """A request's page can be found under a hash: as what was granted to the request, whatever it is by now."""
        holding = self.holdings[request]
        grant = holding.groups[group][index]
        if grant is None or not grant.in_force or grant.page != page:
            self._cached.pop(page, None)  # whoever finds it expects a grant that there never was
            return
        self._cached[page] = Cached(engine_hash, grant)
        if self.marks_cached:
            self._marked.append(Marked(holding, group, index, grant))

    def num_pages(self, request: str, group: int) -> int:
        """How many of a request's pages are known."""
        holding = self.holdings.get(request)
        return 0 if holding is None else len(holding.groups[group])

    def extend(self, request: str, group: int, pages: Iterable[int | None], hash_of: HashOf) -> None:
        """A request's list goes on; None is the null page."""
        holding = self.holdings.get(request)
        if holding is None:
            holding = Holding(request, [[] for _ in self.chains], [0] * len(self.chains))
            self.holdings[request] = holding
        grants = holding.groups[group]
        for page in pages:
            grants.append(None if page is None else self._granted(request, group, len(grants), page, hash_of))

    def leave(self, request: str) -> None:
        """A request has no pages any more: it ended, or was preempted."""
        holding = self.holdings.pop(request, None)
        if holding is None:
            return
        self._left.append((self._number, holding))
        if holding.row is not None:
            self._closing.append(holding)

    def take(self, scheduled: Iterable[str]) -> StepEvents:
        """For the workers, with a step of the requests in ``scheduled``."""
        events = self._events
        closed = self._close(events)
        opened = []
        for request in scheduled:
            holding = self.holdings.get(request)
            if holding is None:
                continue  # it was scheduled with no page at all, and will fail for that
            if holding.row is None:
                holding.row = self._row()
                opened.append((holding.row, request))
            for group, events_of in enumerate(events):
                self._tell(holding, holding.row, group, events_of)
        taken = StepEvents(number=self._number, closed=closed, opened=opened, groups=events)
        self._number += 1
        self._events = [GroupEvents() for _ in self.chains]
        return taken

    def settle(self, number: int) -> None:
        """The result of a step was looked at: whoever left before the next was made is done with."""
        while self._left and self._left[0][0] <= number + 1:
            self._left.popleft()

    def granted_as(self, bad: BadGrant) -> Grant | None:
        """What a page was granted as, while that is in force: it may have been handed out anew since."""
        grant = self._grants.get(bad.page)
        if grant is None or not grant.in_force or grant.group != bad.group:
            return None
        return grant if 0 != grant.generation == bad.generation else None

    def written(self, request: str, first_token: int, page_sizes: Sequence[int]) -> set[Grant]:
        """What was granted to a request and reaches beyond a token, as far as it is in force; wherever the request is
        by now."""
        holdings = [holding for _, holding in self._left if holding.request == request]
        if request in self.holdings:
            holdings.append(self.holdings[request])
        return {
            grant
            for holding in holdings
            for grants, size in zip(holding.groups, page_sizes, strict=True)
            for grant in grants[first_token // size :]
            if grant is not None and grant.in_force and grant.request == request
        }

    def first_token(self, request: str, bad: set[Grant], page_sizes: Sequence[int]) -> int | None:
        """Where in a request the first of some grants begins; None where it reads none of them."""
        firsts = (
            index * size
            for grants, size in zip(self.holdings[request].groups, page_sizes, strict=True)
            for index, grant in enumerate(grants)
            if grant in bad and grant.in_force
        )
        return min(firsts, default=None)

    def _granted(self, request: str, group: int, index: int, page: int, hash_of: HashOf) -> Grant:
        engine_hash = hash_of(index)
        if page in self._handed_out:
            self._handed_out.discard(page)
            self._grants[page] = Grant(page, group, request, self._owner(request, group, index, engine_hash))
            return self._grants[page]
        cached = self._cached.get(page)
        if cached is not None and cached.engine_hash == engine_hash and cached.grant.group == group:
            return cached.grant
        return Grant(page, group, request, self._owner(request, group, index, engine_hash), in_force=False)

    def _owner(self, request: str, group: int, index: int, engine_hash: bytes | None) -> int:
        chains = self.chains[group]
        if engine_hash is not None:
            return owner_of(chains.of_hash(engine_hash))
        start: Chain = chains.start()
        return owner_of(chains.branch(start, request, index))

    def _release(self, grant: Grant) -> None:
        grant.in_force = grant.is_idle = False
        if grant.generation:
            add(self._events[grant.group].released, grant.page)

    def _close(self, events: Sequence[GroupEvents]) -> list[int]:
        """Pages that were cached are marked first, while the rows that wrote them are open.

        vLLM caches a page before the step that fills it; so it is told of with the step behind that.
        """
        for marked in self._due:
            grant, row = marked.grant, marked.holding.row
            if row is not None and grant.in_force and grant.generation:
                add(events[marked.group].cached, grant.page, row, marked.index)
        self._due, self._marked = self._marked, []
        closed = []
        for holding in self._closing:
            assert holding.row is not None, holding.request
            closed.append(holding.row)
            self._free_rows.append(holding.row)
            holding.row = None
        self._closing = []
        return closed

    def _tell(self, holding: Holding, row: int, group: int, events: GroupEvents) -> None:
        grants = holding.groups[group]
        for index in range(holding.sent[group], len(grants)):
            grant = grants[index]
            if grant is None:
                continue
            if grant.in_force and not grant.generation:
                grant.generation = self._draw(group, events)
                add(events.granted, grant.page, row, index, grant.owner)
            else:  # of one that nobody was told of, the generation is 0, which no page has
                add(events.shared, row, index, signed(grant.generation), grant.owner)
        holding.sent[group] = len(grants)

    def _draw(self, group: int, events: GroupEvents) -> int:
        drawn = self.next_generations[group]
        if not events.granted[0]:
            events.first_generation = drawn
        self.next_generations[group] = generation_after(drawn)
        return drawn

    def _row(self) -> int:
        if not self._free_rows:
            raise KvGuardError(
                f"more than {self.num_rows} requests have pages of the KV cache", remedy="raise --max-num-seqs"
            )
        return self._free_rows.pop()
