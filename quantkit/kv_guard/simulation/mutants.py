"""Guards that each lack one thing, so that the self-test is tested: it must notice every one of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.kv_guard.dispatch import SPOILED, PageTags, State, twins
from quantkit.kv_guard.page_tags import PageTagTracker
from quantkit.kv_guard.settings import GuardSettings
from quantkit.kv_guard.simulation.engine import MakeGuard
from quantkit.kv_guard.simulation.report import SelfTestReport
from quantkit.kv_guard.simulation.run import SelfTestPlan, faults_alone
from quantkit.kv_guard.tracker import Held, Step, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """``kinds`` of faults by which it is noticed soonest, and how many of each are enough."""

    make: MakeGuard
    kinds: tuple[str, ...]
    single: int = 4


def silent(check: str) -> MakeGuard:
    """What a check finds is not told."""

    def heard(verdict: Verdict) -> Verdict:
        left = tuple(one for one in verdict.violations if one.check != check)
        named = dict.fromkeys(one.request for one in left if one.request is not None)
        return replace(verdict, violations=left, aborted=tuple(name for name in verdict.aborted if name in named))

    class Silent(PageTagTracker):
        def verdict(self, step: int) -> Verdict:
            return heard(super().verdict(step))

        def settle(self) -> Verdict:
            return heard(super().settle())

    return Silent


class _NoSpoil(PageTagTracker):
    """A token in a wrong page leaves it as it is."""

    def check_writes(self, slots: Tensor, rows: Tensor, positions: Tensor) -> None:
        before = self.tags.seals_P.clone()
        super().check_writes(slots, rows, positions)
        self.tags.seals_P.copy_(before)


class _SpoiledForEver(PageTagTracker):
    """A page where somebody wrote wrongly is nobody's again."""

    def __init__(self, settings: GuardSettings) -> None:
        self._ever_P: Tensor | None = None
        super().__init__(settings)

    def grant(
        self, pages: Tensor, rows: Tensor, indices: Tensor, owners: Tensor, first_generation: int | None = None
    ) -> None:
        super().grant(pages, rows, indices, owners, first_generation)
        if self._ever_P is not None:
            spoiled = pages[self._ever_P[pages]]
            self.tags.seals_P[spoiled] = twins.mark_of(spoiled) ^ SPOILED

    def check_writes(self, slots: Tensor, rows: Tensor, positions: Tensor) -> None:
        super().check_writes(slots, rows, positions)
        marks = twins.mark_of(torch.arange(self.tags.num_pages))
        is_spoiled = self.tags.seals_P == marks ^ SPOILED
        self._ever_P = is_spoiled if self._ever_P is None else self._ever_P | is_spoiled


class _NotCopied(PageTagTracker):
    """Whose page is copied is not asked."""

    def copied(self, sources: Tensor, rows: Tensor, indices: Tensor, to_rows: Tensor) -> None:
        return


def _let_write(tags: PageTags, pages: Tensor) -> None:
    tags.states_P[pages[tags.states_P[pages] == State.SHARED]] = State.HELD


class _NoShared(PageTagTracker):
    """Pages that others read may be written."""

    def cache(self, pages: Tensor, rows: Tensor, indices: Tensor) -> Held:
        held = super().cache(pages, rows, indices)
        _let_write(self.tags, pages)
        return held

    def fork(self, row: int, to_row: int, pages: Tensor) -> None:
        super().fork(row, to_row, pages)
        _let_write(self.tags, pages)


class _NoDirty(PageTagTracker):
    """What a transfer may still write is handed on."""

    def release(self, pages: Tensor) -> None:
        super().release(pages)
        self._arrays.gone_P.fill_(0)


class _NoSums(PageTagTracker):
    """What has arrived is not summed."""

    def arrive(self, pages: Tensor, rows: Tensor, indices: Tensor, checksums: Tensor | None = None) -> None:
        super().arrive(pages, rows, indices)

    def store(self, pages: Tensor, held: Held, checksums: Tensor | None = None) -> Held:
        return super().store(pages, held)


class _NotAgain(PageTagTracker):
    """A row that is written while the step runs is not read again."""

    def before_step(self, step: Step) -> int:
        return super().before_step(replace(step, is_steady=False))


class _EarlyReaders(PageTagTracker):
    """What was announced may be read before it comes."""

    def announce(self, pages: Tensor, transfer: int) -> None:
        super().announce(pages, transfer)
        self.tags.seals_P[pages] = twins.record_seals(self.tags.records_P3[pages]) ^ twins.mark_of(pages)


class _NeverClosed(PageTagTracker):
    """Whose row it was has it for ever."""

    def close(self, row: int) -> None:
        return


class _NotAsked(PageTagTracker):
    """Whether a row holds what it gives to a node is not asked."""

    def cache(self, pages: Tensor, rows: Tensor, indices: Tensor) -> Held:
        before = self._arrays.ring.count_1.clone()
        held = super().cache(pages, rows, indices)
        self._arrays.ring.count_1.copy_(before)
        self.tags.states_P[pages] = State.SHARED
        return held


class _NotSent(PageTagTracker):
    """Whether what was sent is what lies there is not asked, neither before nor behind it."""

    def sent(self, pages: Tensor, held: Held) -> None:
        return


class _NotTouched(PageTagTracker):
    """Whoever is given a page where a late transfer may write is told so, and passes there."""

    def grant(
        self, pages: Tensor, rows: Tensor, indices: Tensor, owners: Tensor, first_generation: int | None = None
    ) -> None:
        super().grant(pages, rows, indices, owners, first_generation)
        twins.put_tags(self.tags, pages, self.tags.records_P3[pages])
        self._arrays.touched_P.fill_(False)


MUTANTS: Mapping[str, Mutant] = {
    "before_step": Mutant(make=silent("before_step"), kinds=("7",)),
    "after_step": Mutant(make=silent("after_step"), kinds=("2", "4")),
    "write": Mutant(make=silent("write"), kinds=("11",)),
    "grant": Mutant(make=silent("grant"), kinds=("6",)),
    "release": Mutant(make=silent("release"), kinds=("6",)),
    "holder": Mutant(make=silent("holder"), kinds=("14", "fork")),
    "arrival": Mutant(make=silent("arrival"), kinds=("2",)),
    "content": Mutant(make=silent("content"), kinds=("13",)),
    "landing": Mutant(make=silent("landing"), kinds=("1",)),
    "no sums": Mutant(make=_NoSums, kinds=("bit",)),
    "no spoil": Mutant(make=_NoSpoil, kinds=("11",)),
    "spoiled for ever": Mutant(make=_SpoiledForEver, kinds=("fork",), single=8),
    "copied": Mutant(make=_NotCopied, kinds=("fork",)),
    "shared": Mutant(make=_NoShared, kinds=("fork",)),
    "dirty": Mutant(make=_NoDirty, kinds=("1",), single=8),
    "announced": Mutant(make=_EarlyReaders, kinds=("early",)),
    "closed": Mutant(make=_NeverClosed, kinds=("7",)),
    "cached": Mutant(make=_NotAsked, kinds=("9",)),
    "sent": Mutant(make=_NotSent, kinds=("14",)),
    "touched": Mutant(make=_NotTouched, kinds=("1",)),
    "read again": Mutant(make=_NotAgain, kinds=("4",)),
}


def noticed(mutant: Mutant, seed: int) -> SelfTestReport:
    """What the self-test has to say of it."""
    plan = SelfTestPlan(seed=seed, single=mutant.single, combined=0, content=True, only=mutant.kinds)
    return faults_alone(plan, mutant.make)
