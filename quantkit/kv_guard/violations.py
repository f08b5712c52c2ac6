"""What a line of the ring says: which check failed, for whom, what was expected there and what was found."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from quantkit.kv_guard.dispatch import (
    BEYOND,
    FREE_INDEX,
    HOLE,
    MOST_PAGES,
    NEVER,
    PLACE_MASK,
    PRUNED,
    SHIFTED,
    SPOILED,
    UNARRIVED,
    UNGRANTED,
    Check,
    State,
    Word,
)
from quantkit.kv_guard.faults import Fault, in_words
from quantkit.kv_guard.seals import mark_of, page_of_mark, seal_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """Of a page, as unsigned numbers; ``index`` is None for a free one."""

    generation: int
    owner: int
    index: int | None
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a check compared: ``index`` is that of the row's logical page, None where no row was at hand.

    ``expected`` is None where nothing was, or where the row's details were rewritten since the step was launched.
    """

    page: int
    index: int | None
    expected_seal: int
    expected: Tag | None
    found_seal: int
    found: Tag
    slot: int | None = None
    position: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One failed check; ``row`` and ``request`` are None where a page is at fault and no row was at hand, ``request``
    alone where nobody had the row."""

    step: int
    check: str
    fault: Fault
    row: int | None
    request: str | None
    evidence: Evidence

    @property
    def text(self) -> str:
        """One line, for an error or a log, whatever the request is called."""
        return in_words(self.fault, self.request, self.row, f"physical page {self.evidence.page}")

    def document(self) -> dict[str, object]:
        """For an incident file: seals, generations and owners in hexadecimal. It holds no token."""
        evidence = asdict(self.evidence)
        for name in ("expected_seal", "found_seal"):
            evidence[name] = f"{evidence[name]:016x}"
        for name in ("expected", "found"):
            if evidence[name] is not None:
                evidence[name] |= {key: f"{evidence[name][key]:016x}" for key in ("generation", "owner")}
        return {
            "step": self.step,
            "check": self.check,
            "fault": str(self.fault),
            "request": self.request,
            "row": self.row,
            **evidence,
        }


def read_line(words: Sequence[int], requests: Mapping[int, str], *, num_pages: int, page_size: int) -> Violation:
    """``words`` are a line of the ring, int64; ``requests`` names by opening."""
    check, row = Check(words[Word.CHECK]), words[Word.ROW]
    evidence = _evidence(words, check, has_row=row >= 0)
    fault = _OF_A_CHECK.get(check)
    if check is Check.ANNOUNCEMENT:
        fault = _OF_A_STATE.get(words[Word.DETAIL], Fault.LANDING)
    if check is not Check.OPENING and not 0 <= evidence.page < num_pages:
        fault = Fault.OUTSIDE_POOL
    return Violation(
        step=words[Word.STEP],
        check=check.name.lower(),
        fault=fault or _fault_of(evidence, check, page_size),
        row=row if row >= 0 else None,
        request=requests.get(words[Word.OPENING]),
        evidence=evidence,
    )


def _evidence(words: Sequence[int], check: Check, *, has_row: bool) -> Evidence:
    unsigned = [word & (1 << 64) - 1 for word in words]
    place, index = unsigned[Word.FOUND_PLACE], words[Word.INDEX] if has_row else None
    expected = Tag(
        generation=unsigned[Word.EXPECTED_GENERATION], owner=unsigned[Word.EXPECTED_OWNER], index=index, checksum=0
    )
    seal = unsigned[Word.EXPECTED_SEAL]
    is_known = index is not None and seal == seal_of(expected.generation, expected.owner, index)
    return Evidence(
        page=words[Word.PAGE],
        index=index,
        expected_seal=seal,
        expected=expected if is_known else None,
        found_seal=unsigned[Word.FOUND_SEAL],
        found=Tag(
            generation=unsigned[Word.FOUND_GENERATION],
            owner=unsigned[Word.FOUND_OWNER],
            index=None if place & PLACE_MASK == FREE_INDEX else place & PLACE_MASK,
            checksum=place >> 32,
        ),
        slot=words[Word.SLOT] if check is Check.WRITE else None,
        position=words[Word.DETAIL] if check is Check.WRITE else None,
    )


def _fault_of(evidence: Evidence, check: Check, page_size: int) -> Fault:
    """The first that explains it; what the seal says comes before what the record says."""
    if evidence.expected_seal in _OF_NO_SEAL:
        return _OF_NO_SEAL[evidence.expected_seal]
    if evidence.found_seal == SPOILED:
        return Fault.SPOILED
    is_right = evidence.found_seal == evidence.expected_seal
    if evidence.found_seal == UNARRIVED or (check is Check.ARRIVAL and is_right):
        return Fault.NOT_ARRIVED
    if not is_right:
        return _difference(evidence, has_travelled=check is Check.ARRIVAL)
    return Fault.FREED if check is Check.HOLDER else _fault_of_write(evidence, page_size)


def _fault_of_write(evidence: Evidence, page_size: int) -> Fault:
    assert evidence.slot is not None, evidence
    is_out = evidence.slot % page_size != (evidence.position or 0) % page_size
    return Fault.WRITE_OUT_OF_PLACE if is_out else Fault.WRITE_TO_SHARED


_OF_NO_SEAL = {
    NEVER: Fault.NEVER_GRANTED,
    UNGRANTED: Fault.NEVER_GRANTED,
    PRUNED: Fault.NEVER_GRANTED,
    SHIFTED: Fault.SHIFTED,
    BEYOND: Fault.BEYOND,
    HOLE: Fault.HOLE,
}
_OF_A_CHECK = {
    Check.GRANT: Fault.GRANTED_TWICE,
    Check.RELEASE: Fault.FREED_TWICE,
    Check.CONTENT: Fault.CONTENT,
    Check.LANDING: Fault.LANDING,
    Check.OPENING: Fault.ROW_TAKEN,
}
_OF_A_STATE: Mapping[int, Fault] = {
    State.FREE: Fault.FREED,
    State.SHARED: Fault.WRITE_TO_SHARED,
}  # of a page that a transfer is to write


def _seal_of(tag: Tag) -> int:
    return seal_of(tag.generation, tag.owner, FREE_INDEX if tag.index is None else tag.index)


def _difference(evidence: Evidence, *, has_travelled: bool) -> Fault:
    """Of a page from what was expected there; a tag that travelled is marked with a page of another pool."""
    found, expected = evidence.found, evidence.expected
    mark = evidence.found_seal ^ _seal_of(found)
    if mark and page_of_mark(mark ^ mark_of(evidence.page)) >= MOST_PAGES:
        return Fault.TORN
    if mark and not has_travelled:
        return Fault.OTHER_PAGE
    if found.index is None:
        return Fault.FREED
    if expected is None or found.owner != expected.owner:
        return Fault.OTHER_OWNER
    return Fault.MISPLACED if found.index != expected.index else Fault.GRANTED_ANEW
