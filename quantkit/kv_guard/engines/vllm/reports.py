"""What a worker reports of a step, and how it goes back: with the step's result."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from quantkit.kv_guard.engines.vllm.events import EVENTS, BadGrant, FirstBad, StepReport
from quantkit.kv_guard.tracker import Verdict
from quantkit.kv_guard.violations import Violation


class GuardedOutput:
    """Of a step, as vLLM's `AsyncModelRunnerOutput`: waited for where its result is."""

    def __init__(self, inner: Any, report: Callable[[], StepReport | None]) -> None:
        self._inner = inner
        self._report = report

    def get_output(self) -> Any:
        """The output, with the report as an attribute that is pickled with it."""
        is_waited_for = hasattr(self._inner, "get_output")
        output = copy.copy(self._inner.get_output() if is_waited_for else self._inner)  # one for all steps may be empty
        setattr(output, EVENTS, self._report())
        return output

    def get_kv_connector_output(self) -> Any:
        """As the output without a guard."""
        is_waited_for = hasattr(self._inner, "get_kv_connector_output")
        return self._inner.get_kv_connector_output() if is_waited_for else self._inner.kv_connector_output


def report_of(verdict: Verdict, group: int) -> StepReport:
    """Of a group of layers."""
    firsts = {
        name: min((one.evidence.index or 0 for one in verdict.violations if one.request == name), default=0)
        for name in verdict.aborted
    }
    return StepReport(
        ended=verdict.aborted,
        first_bad=tuple(FirstBad(request=name, group=group, index=first) for name, first in firsts.items()),
        bad_grants=tuple(dict.fromkeys(_bad_grants(verdict.violations, group))),
    )


def _bad_grants(violations: Sequence[Violation], group: int) -> Iterator[BadGrant]:
    """For a write the generation of the page's record, whose holder was harmed; for a read what was expected."""
    for violation in violations:
        evidence = violation.evidence
        was = evidence.found if violation.check == "write" else evidence.expected
        if was is not None:
            yield BadGrant(group=group, page=evidence.page, generation=was.generation)
