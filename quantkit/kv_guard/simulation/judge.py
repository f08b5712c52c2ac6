"""Who is right: which violations belong to a fault that was injected, and which wrong content reached a user."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from quantkit.kv_guard.simulation.truth import Place, Wrongs
from quantkit.kv_guard.tracker import Verdict
from quantkit.kv_guard.violations import Violation

Page = tuple[str, int]  # of a pool


@dataclass(slots=True, eq=False)
class Injection:
    """One fault. What it may concern is known to whoever injects it: pages of pools, requests by name."""

    kind: str
    pages: set[Page] = field(default_factory=set)
    requests: set[str] = field(default_factory=set)
    lives: set[tuple[str, int]] = field(default_factory=set)  # of these requests, by epoch; empty: of anybody
    is_fired: bool = False
    since: int = 0  # the operation of the stream behind which it takes effect
    seen: list[str] = field(default_factory=list)  # the checks that saw it, in their order
    leaked: int = 0
    unsaid: list[str] = field(default_factory=list)  # the checks at which the guard had to name it, and did not
    is_felt: bool = False  # a step read a page that it concerns, for a request that it concerns

    @property
    def is_caught(self) -> bool:
        """Before any token that it spoiled was released, and at each check that could see it."""
        return bool(self.seen) and not (self.leaked or self.unsaid)

    def concerns(self, pages: Iterable[Page], request: str | None) -> bool:
        return request in self.requests or any(page in self.pages for page in pages)


class Judge:
    """Knows the faults that are under way."""

    def __init__(self) -> None:
        self.active: list[Injection] = []
        self.false_positives: list[str] = []
        self.leaks: list[str] = []  # that no fault explains
        self.faults: Counter[str] = Counter()

    def see(self, pool: str, verdict: Verdict, wrongs: Wrongs | None = None) -> None:
        """What the guard says of a pool, and what is ``wrong`` there. Whom it ends are those whom it names, and no
        others; whom it names has been wronged at that check, by a fault that was injected; and of whom it is silent has
        not, as far as a tag can tell."""
        left = dict(wrongs or {})
        named = {one.request for one in verdict.violations if one.request is not None}
        for request in sorted(named ^ set(verdict.aborted)):
            what = "is named and goes on" if request in named else "is ended, and no violation names it"
            self.false_positives.append(f"{pool}: {request} {what}")
        for violation in verdict.violations:
            self.faults[violation.fault] += 1
            page = pool, violation.evidence.page
            concerned = [one for one in self.active if one.is_fired and one.concerns([page], violation.request)]
            for injection in concerned:
                injection.seen.append(violation.check)
            is_so = place_of(violation) in (wrongs or {})
            left.pop(place_of(violation), None)
            if not (concerned and is_so):
                why = "" if is_so else ", where nothing is wrong"
                self.false_positives.append(f"{pool}: {violation.check}{why}: {violation.text}")
        assert not verdict.lost, "the ring was too small to judge by"

        for place, is_sure in left.items():
            if is_sure:
                self._miss(pool, place)

    def _miss(self, pool: str, place: Place) -> None:
        concerned = [one for one in self.active if one.is_fired and one.concerns([(pool, place.page)], place.request)]
        for injection in concerned:
            injection.unsaid.append(place.check)
        if not concerned:
            self.leaks.append(f"{pool}: {place.check} said nothing of page {place.page} for {place.request}")

    def leak(self, pool: str, request: str, pages: Iterable[int]) -> None:
        """A token was released that was made of wrong content; ``pages`` are those where it was read."""
        places = [(pool, page) for page in pages]
        concerned = [one for one in self.active if one.is_fired and one.concerns(places, request)]
        for injection in concerned:
            injection.leaked += 1
        if not concerned:
            self.leaks.append(f"{pool}: {request} read {places}")

    def feel(self, pool: str, lives: Sequence[tuple[str, int]], pages_BL: Tensor, begun: int) -> None:
        """A step reads pages, a row for each request. Where a fault names requests, it is these that count: a page that
        was stolen may have become another's by right."""
        for injection in self.active:
            if injection.is_fired and not injection.is_felt and begun > injection.since:
                of_whom = [at for at, life in enumerate(lives) if not injection.lives or life in injection.lives]
                read = {(pool, page) for page in pages_BL[of_whom].flatten().tolist()}
                injection.is_felt = not injection.pages.isdisjoint(read)

    def spread(self, pool: str, pages: Iterable[int], to_pool: str, to_pages: Iterable[int]) -> None:
        """Content is copied, and what is wrong with it."""
        for injection in self.active:
            if injection.is_fired:
                pairs = zip(pages, to_pages, strict=True)
                injection.pages |= {(to_pool, target) for page, target in pairs if (pool, page) in injection.pages}

    def is_free(self, pages: Iterable[Page], requests: Iterable[str] = (), of: Injection | None = None) -> bool:
        """Not concerned by what is under way, but for ``of``, so that two faults are not taken for each other."""
        places, names = list(pages), [*requests, ""]
        return not any(one.concerns(places, name) for one in self.active if one is not of for name in names)


def place_of(violation: Violation) -> Place:
    """Which check speaks of what."""
    return Place(violation.check, violation.row, violation.evidence.index, violation.evidence.page, violation.request)
