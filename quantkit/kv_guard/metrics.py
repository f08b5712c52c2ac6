"""What the guard has seen, in Prometheus' text format."""

from collections import Counter

from quantkit.kv_guard.faults import Fault
from quantkit.kv_guard.identity import PoolIdentity
from quantkit.kv_guard.tracker import Verdict

_PREFIX = "quantkit_kv_guard"
_HELP = {
    "checks_total": "Steps that were checked.",
    "pages_total": "Pages that were checked, before and after each step.",
    "microseconds_total": "Time of the checks.",
    "violations_total": "Pages that were not what their request was granted.",
    "violations_lost_total": "Violations for which a step's ring had no room.",
    "incidents_unwritten_total": "Violations that the file did not take.",
    "aborted_requests_total": "Requests that were ended.",
}
FAMILIES = tuple(f"{_PREFIX}_{name}" for name in _HELP)


class Metrics:
    """Counters of one pool, from its first step on."""

    def __init__(self, identity: PoolIdentity) -> None:
        self._pool = identity.pool
        self.checks = self.pages = self.lost = self.aborted = self.unwritten = 0
        self.seconds = 0.0
        self.violations: Counter[Fault] = Counter()

    def count(self, verdict: Verdict, *, num_pages: int, seconds: float) -> None:
        """Add a step."""
        self.checks += 1
        self.pages += num_pages
        self.seconds += seconds
        self.lost += verdict.lost
        self.aborted += len(verdict.aborted)
        self.violations.update(violation.fault for violation in verdict.violations)

    def text(self) -> str:
        """One sample a counter; faults that never came are 0, so that an alert has something to look at."""
        label = f'pool="{_escaped(self._pool)}"'
        by_fault = {f'{label},fault="{fault}"': self.violations[fault] for fault in Fault}
        lines = [
            *_counter("checks_total", {label: self.checks}),
            *_counter("pages_total", {label: self.pages}),
            *_counter("microseconds_total", {label: round(self.seconds * 1e6)}),
            *_counter("violations_total", by_fault),
            *_counter("violations_lost_total", {label: self.lost}),
            *_counter("incidents_unwritten_total", {label: self.unwritten}),
            *_counter("aborted_requests_total", {label: self.aborted}),
        ]
        return "\n".join(lines) + "\n"


def _counter(name: str, samples: dict[str, int]) -> list[str]:
    full = f"{_PREFIX}_{name}"
    return [
        f"# HELP {full} {_HELP[name]}",
        f"# TYPE {full} counter",
        *(f"{full}{{{labels}}} {value}" for labels, value in samples.items()),
    ]


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
