"""What a self-test found, and when a check sees what."""

from collections import Counter
from dataclasses import dataclass, field

from quantkit.kv_guard.faults import MOMENTS
from quantkit.kv_guard.simulation.faults.kinds import KINDS
from quantkit.kv_guard.simulation.judge import Injection
from quantkit.kv_guard.tracker import STEP_CHECKS


@dataclass(slots=True, kw_only=True)
class KindCount:
    """Of one kind: ``missed`` are those that spoiled a token which was released, that nothing saw although a step
    read what they touched, or that a check did not name which could see them; ``harmless`` ones no step ever read."""

    kind: str
    injected: int = 0
    caught: int = 0
    missed: int = 0
    combined: int = 0  # of those injected, beside another fault
    harmless: int = 0
    late: int = 0  # of those missed: something saw them, and a check before that had to
    when: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """What happens."""
        return KINDS[self.kind].name

    def count(self, injection: Injection, *, is_combined: bool) -> None:
        """Add what became of a fault."""
        if not injection.is_fired:
            return
        if not (injection.seen or injection.leaked or injection.unsaid or injection.is_felt):
            self.harmless += 1
            return
        self.injected += 1
        self.combined += is_combined
        is_late = bool(injection.seen) and (bool(injection.unsaid) or self._is_behind(injection.seen[0]))
        is_caught = injection.is_caught and not is_late
        self.caught += is_caught
        self.missed += not is_caught
        self.late += is_late
        if injection.seen:
            self.when[injection.seen[0]] += 1

    def _is_behind(self, check: str) -> bool:
        return KINDS[self.kind].is_ahead and check in STEP_CHECKS

    @property
    def seen_first(self) -> str:
        """By which checks, and how often."""
        return ", ".join(f"{MOMENTS[check]} {self.when[check]}" for check in MOMENTS if self.when[check])

    def document(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "kind": self.kind,
            "name": self.name,
            "injected": self.injected,
            "caught": self.caught,
            "missed": self.missed,
            "combined": self.combined,
            "harmless": self.harmless,
            "late": self.late,
            "when": {check: self.when[check] for check in MOMENTS if self.when[check]},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestReport:
    """``checks`` are pages that were checked, before and after each step, ``clean_checks`` those of worlds without
    faults; ``leaks`` are tokens that were made of wrong content and no fault explains."""

    seed: int
    kinds: tuple[KindCount, ...]
    checks: int
    clean_checks: int
    steps: int
    false_positives: tuple[str, ...]
    leaks: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Each kind happened, all of it was caught, and nothing else was said."""
        is_caught = all(kind.injected and not kind.missed for kind in self.kinds)
        return is_caught and not (self.false_positives or self.leaks)

    def document(self) -> dict[str, object]:
        """As JSON has it: no time, so that one seed gives one document."""
        return {
            "seed": self.seed,
            "kinds": [kind.document() for kind in self.kinds],
            "checks": self.checks,
            "clean_checks": self.clean_checks,
            "steps": self.steps,
            "false_positives": len(self.false_positives),
            "leaks": len(self.leaks),
        }
