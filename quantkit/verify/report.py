"""Findings of a verification."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.engines.verdicts import EngineReport
from quantkit.errors import QuantkitError, VerificationError
from quantkit.integrity.weight_errors import ClassError, WeightError


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, or worth a look. ``check`` names what found it."""

    check: str
    message: str
    is_error: bool = True
    tensor: str | None = None
    file: str | None = None
    remedy: str = ""

    @staticmethod
    def of(check: str, error: QuantkitError) -> "Finding":
        """An error raised by a check that stops at the first fault."""
        return Finding(check=check, message=error.message, tensor=error.tensor, file=error.file, remedy=error.remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """``checks``: what was looked at, in order; ``classes`` and ``errors`` only where the source was given, ``engine``
    only where one was named.
    """

    output: Path
    checks: tuple[str, ...]
    findings: tuple[Finding, ...]
    num_tensors: int
    classes: tuple[ClassError, ...] = ()
    errors: tuple[WeightError, ...] = ()
    engine: EngineReport | None = None

    @property
    def is_good(self) -> bool:
        return not any(finding.is_error for finding in self.findings)

    def with_findings(self, more: Iterable[Finding]) -> "VerifyReport":
        """The same with more findings."""
        return replace(self, findings=(*self.findings, *more))

    def first_error(self) -> str:
        """The first error and the number of the others, in one line; empty where all is good."""
        bad = [finding for finding in self.findings if finding.is_error]
        if not bad:
            return ""
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        remedy = bad[0].remedy or "convert again"
        return str(VerificationError(bad[0].message + more, tensor=bad[0].tensor, file=bad[0].file, remedy=remedy))


def first_findings(findings: Iterable[Finding], limit: int) -> tuple[Finding, ...]:
    """The first findings of a check that may find the same fault 60,000 times."""
    kept: list[Finding] = []
    for finding in findings:
        kept.append(finding)
        if len(kept) == limit:
            break
    return tuple(kept)
