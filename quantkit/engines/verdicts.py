"""What is said of a module in an engine, and of all that are alike in one line."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from quantkit.engines.parallel import EngineName

_NUMBER = re.compile(r"\b\d+\b")


class Outcome(StrEnum):
    """Worst first."""

    SILENT = "loads silently wrong"
    REFUSED = "refused"
    FLAG = "needs a flag"
    UNKNOWN = "unknown"
    LOADS = "loads"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleVerdict:
    """One runtime module in one engine. ``scheme`` in words; ``tensor``: the first of the checkpoint that is wrong."""

    module: str
    outcome: Outcome
    scheme: str = ""
    message: str = ""
    tensor: str | None = None
    remedy: str = ""


@dataclass(slots=True, kw_only=True)
class EngineRow:
    """Modules that differ in their numbers alone and share a verdict; ``example`` is the first of them."""

    modules: str
    example: ModuleVerdict
    num_modules: int = 0
    numbers: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """With the first and the last number in place of the star."""
        if not self.numbers:
            return self.modules
        first, last = min(self.numbers), max(self.numbers)
        return self.modules.replace("*", str(first) if first == last else f"{{{first}-{last}}}", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Verdicts of one engine, those that load silently wrong first."""

    engine: EngineName
    version: str
    rows: tuple[EngineRow, ...]

    def with_outcome(self, outcome: Outcome) -> tuple[EngineRow, ...]:
        return tuple(row for row in self.rows if row.example.outcome is outcome)

    @property
    def num_modules(self) -> int:
        return sum(row.num_modules for row in self.rows)

    @property
    def bad_rows(self) -> tuple[EngineRow, ...]:
        """What no flag of a server makes good."""
        return self.with_outcome(Outcome.SILENT) + self.with_outcome(Outcome.REFUSED)

    @property
    def worst(self) -> Outcome:
        """The worst of all modules."""
        return next((outcome for outcome in Outcome if self.with_outcome(outcome)), Outcome.LOADS)


def collect_rows(verdicts: Iterable[ModuleVerdict]) -> tuple[EngineRow, ...]:
    """One row for modules that are alike, worst first, else in the order in which they come."""
    rows: dict[tuple[str, ...], EngineRow] = {}
    for verdict in verdicts:
        numbers = _NUMBER.findall(verdict.module)
        name = _NUMBER.sub("*", verdict.module, count=1)
        key = (name, verdict.outcome, verdict.scheme, _NUMBER.sub("*", verdict.message))
        row = rows.setdefault(key, EngineRow(modules=name, example=verdict))
        row.num_modules += 1
        row.numbers += [int(number) for number in numbers[:1]]
    order = list(Outcome)
    return tuple(sorted(rows.values(), key=lambda row: order.index(row.example.outcome)))
