"""What the guard has seen, in Prometheus' text format."""

from collections import Counter

from quantkit.kv_guard.faults import Fault
from quantkit.kv_guard.identity import PoolIdentity
from quantkit.kv_guard.tracker import Verdict

_PREFIX = "quantkit_kv_guard"
_HELP = {
    "attached": "1 while a guard checks this pool, 0 where it went off.",
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
        self._identity = identity
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

    def text(self, *, rank: int | None = None, is_attached: bool = True) -> str:
        """One sample a counter; faults that never came are 0, so that an alert has something to look at.

        ``rank`` is that of the pool's process in its server; None where there is none.
        """
        identity = self._identity
        label = _labels(pool=identity.pool) if rank is None else _labels(pool=identity.pool, rank=rank)
        of_what = f"{label},{_labels(model=identity.model, layout=identity.layout)}"
        by_fault = {f'{label},fault="{fault}"': self.violations[fault] for fault in Fault}
        lines = [
            *_family("attached", "gauge", {of_what: int(is_attached)}),
            *_family("checks_total", "counter", {label: self.checks}),
            *_family("pages_total", "counter", {label: self.pages}),
            *_family("microseconds_total", "counter", {label: round(self.seconds * 1e6)}),
            *_family("violations_total", "counter", by_fault),
            *_family("violations_lost_total", "counter", {label: self.lost}),
            *_family("incidents_unwritten_total", "counter", {label: self.unwritten}),
            *_family("aborted_requests_total", "counter", {label: self.aborted}),
        ]
        return "\n".join(lines) + "\n"


def _family(name: str, kind: str, samples: dict[str, int]) -> list[str]:
    full = f"{_PREFIX}_{name}"
    return [
        f"# HELP {full} {_HELP[name]}",
        f"# TYPE {full} {kind}",
        *(f"{full}{{{labels}}} {value}" for labels, value in samples.items()),
    ]


def _labels(**values: object) -> str:
    return ",".join(f'{name}="{_escaped(str(value))}"' for name, value in values.items())


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
