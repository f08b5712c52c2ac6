"""The worker's side in vLLM: a tracker for each group of layers, told of a step's events before it, asked behind it."""

import copy
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from quantkit.kv_guard.engines.columns import columns_on
from quantkit.kv_guard.engines.logbook import Logbook
from quantkit.kv_guard.engines.refusals import Refusals
from quantkit.kv_guard.engines.settings import PluginSettings, check_memory, path_of
from quantkit.kv_guard.engines.vllm.events import EVENTS, FirstBad, GroupEvents, Spoiled, StepEvents, StepReport
from quantkit.kv_guard.engines.vllm.settings import Group
from quantkit.kv_guard.page_tags import PageTagTracker
from quantkit.kv_guard.settings import GuardSettings, PoolSize
from quantkit.kv_guard.tracker import Held, KvGuardError, Step, Verdict
from quantkit.kv_guard.violations import Violation

NULL_PAGE = 0  # of every pool; no request is ever granted it
_BYTES_A_PLACE = 36 + 4  # of a row's logical page: what it expects, what a launched step captures, and the table
_BYTES_A_PAGE = 36 + 2
_LOG = logging.getLogger("vllm.quantkit_kv_guard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Of a worker: its pool, how many requests, and the width of each group's page table."""

    num_pages: int
    num_rows: int
    most_pages: Sequence[int]
    most_tokens: int  # of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a step will read, as attention is given it; tensors on the device, tables and slots of each group.

    ``tables`` [B, L] pages, ``slots`` [T], ``lengths`` [B] tokens with those of this step, ``starts`` [B + 1] where the
    tokens of each request begin, ``positions`` [T]. ``most_tokens``: the longest, known without asking the device.
    """

    requests: Sequence[str]
    tables: Sequence[Tensor]
    slots: Sequence[Tensor]
    lengths: Tensor
    starts: Tensor
    positions: Tensor
    most_tokens: int


class WorkerGuard:
    """Of one worker. Verdicts may be asked for in another thread, by one at a time, in the order of the steps."""

    def __init__(
        self, groups: Sequence[Group], widths: Widths, settings: PluginSettings, device: torch.device, rank: int = 0
    ) -> None:
        self._groups = groups
        self.refusals = Refusals(settings.mode, _LOG)
        self._device = device
        self._rows: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._next = 0
        self._must_be_told = False
        self.is_told = False  # of the step that is being run
        self._launched: tuple[int, ...] | None = None
        self._finished: deque[tuple[int, ...]] = deque()
        check_memory(_num_bytes(widths), settings, f"{widths.num_rows} rows of {max(widths.most_pages)} pages")
        self._token_numbers = torch.arange(widths.most_tokens, device=device)
        self._tables = [
            torch.zeros(widths.num_rows, most, dtype=torch.int32, device=device) for most in widths.most_pages
        ]
        self.trackers = [
            PageTagTracker(_settings_of(group, widths, number, settings, rank), device)
            for number, group in enumerate(groups)
        ]
        self._lock = Lock()
        self._logbooks = [
            Logbook(tracker, settings, _LOG, (rank, number), self._lock) for number, tracker in enumerate(self.trackers)
        ]
        for logbook in self._logbooks:
            self.refusals.when_off(logbook.detach)

    def end_warm_up(self) -> None:
        """From here on every step is a scheduler's."""
        self._must_be_told = True

    def begin(self, scheduler_output: Any) -> None:
        """Do what a step's events say; a step that warms up has none. Refuses another without, and one that is out of
        order."""
        events: StepEvents | None = getattr(scheduler_output, EVENTS, None)
        self.is_told = False
        with self.refusals.refusing(), self._lock:
            if events is not None:
                self._begin(events)
            elif self._must_be_told:
                raise KvGuardError(
                    "a step came without the events of its scheduler: the guard is off or not loaded there",
                    remedy="install quantkit, and set the same environment, where the engine core runs",
                )

    def launch(self, batch: Batch) -> None:
        """Check what a step will read and write; it runs behind this, on the same stream."""
        self._finished.clear()  # of a step that failed: nobody will ask for it
        with self.refusals.refusing(), self._lock:
            self._launched = self._launch(batch)

    def finish(self) -> None:
        """The step was launched: check behind it."""
        if self._launched is None:
            return  # no request was in it
        with self._lock:
            for tracker in self.trackers:
                tracker.after_step()
        self._finished.append(self._launched)
        self._launched = None

    def guarded(self, output: Any) -> Any:
        """A step's output with its report; ``output`` itself where there was no step."""
        if output is None or not self._finished:
            return output
        return GuardedOutput(output, self, self._finished.popleft())

    def report(self, numbers: Sequence[int]) -> StepReport | None:
        """Of a step, when its result is at hand; None where the guard goes off. Raises KvGuardError in mode halt."""
        report = StepReport()
        with self.refusals.refusing():
            for group, (logbook, number) in enumerate(zip(self._logbooks, numbers, strict=True)):
                report = report.together(_report_of(logbook.verdict(number), group))
            return report
        return None

    def _begin(self, events: StepEvents) -> None:
        if events.number != self._next:
            raise KvGuardError(
                f"events of step {events.number} came, {self._next} was next", remedy="restart the server"
            )
        self._must_be_told = self.is_told = True
        self._next += 1
        self._apply(events)

    def _launch(self, batch: Batch) -> tuple[int, ...]:
        """The step's number of each tracker."""
        rows = columns_on(self._device, [self._rows_of(batch.requests)])[0]
        count = len(batch.requests)
        lengths = batch.lengths[:count].long()
        computed = lengths - (batch.starts[1 : count + 1] - batch.starts[:count]).long()
        tokens = self._token_numbers[: len(batch.positions)]
        rows_T = rows[torch.searchsorted(batch.starts[1 : count + 1].long(), tokens, right=True).clamp_(max=count - 1)]
        numbers = []
        for group, logbook, tracker, own, table, slots in zip(
            self._groups, self._logbooks, self.trackers, self._tables, batch.tables, batch.slots, strict=True
        ):
            most = min(-(-batch.most_tokens // group.page_size), own.shape[1])
            own[:, :most].index_copy_(0, rows, table[:count, :most])
            firsts = None if group.reach is None else (computed - group.reach).clamp_(min=0) // group.page_size
            step = Step(table=own, rows=rows, lengths=lengths, most_pages=most, firsts=firsts)
            numbers.append(logbook.before_step(step))
            tracker.check_writes(slots[: len(tokens)].long(), rows_T, batch.positions.long())
        return tuple(numbers)

    def _apply(self, events: StepEvents) -> None:
        columns = iter(columns_on(self._device, [column for group in events.groups for column in group.columns()]))
        parts = [_Parts.of(group, columns) for group in events.groups]
        for tracker, part in zip(self.trackers, parts, strict=True):
            if len(part.cached[0]):
                tracker.cache(*part.cached)
        for row in events.closed:
            del self._rows[self._names.pop(row)]
            for tracker in self.trackers:
                tracker.close(row)
        for tracker, part in zip(self.trackers, parts, strict=True):
            if len(part.released):
                tracker.release(part.released)
        for row, request in events.opened:
            self._rows[request], self._names[row] = row, request
            for tracker in self.trackers:
                tracker.open(row, request)
        for tracker, part, group in zip(self.trackers, parts, events.groups, strict=True):
            if len(part.granted[0]):
                pages, rows, indices, owners = part.granted
                tracker.grant(pages, rows, indices, owners, group.first_generation)
            if len(part.shared[0]):
                rows, indices, generations, owners = part.shared
                tracker.share(rows, indices, Held(generations=generations, owners=owners, indices=indices))

    def _rows_of(self, requests: Sequence[str]) -> list[int]:
        missing = [request for request in requests if request not in self._rows]
        if missing:
            raise KvGuardError(
                f"request {missing[0]} runs, and the scheduler has granted it nothing", remedy="restart the server"
            )
        return [self._rows[request] for request in requests]


class GuardedOutput:
    """Of a step, as vLLM's `AsyncModelRunnerOutput`: waited for where its result is."""

    def __init__(self, inner: Any, guard: WorkerGuard, numbers: Sequence[int]) -> None:
        self._inner = inner
        self._guard = guard
        self._numbers = numbers

    def get_output(self) -> Any:
        """The output, with the report as an attribute that is pickled with it."""
        is_waited_for = hasattr(self._inner, "get_output")
        output = copy.copy(self._inner.get_output() if is_waited_for else self._inner)  # one for all steps may be empty
        setattr(output, EVENTS, self._guard.report(self._numbers))
        return output

    def get_kv_connector_output(self) -> Any:
        """As the output without a guard."""
        is_waited_for = hasattr(self._inner, "get_kv_connector_output")
        return self._inner.get_kv_connector_output() if is_waited_for else self._inner.kv_connector_output


@dataclass(frozen=True, slots=True)
class _Parts:
    """Columns of a group's events, on the device."""

    cached: list[Tensor]
    released: Tensor
    granted: list[Tensor]
    shared: list[Tensor]

    @classmethod
    def of(cls, group: GroupEvents, columns: Iterator[Tensor]) -> "_Parts":
        """Takes as many as `GroupEvents.columns` gave."""
        kinds = [[next(columns) for _ in kind] for kind in (group.cached, group.released, group.granted, group.shared)]
        return cls(kinds[0], kinds[1][0], kinds[2], kinds[3])


def _settings_of(group: Group, widths: Widths, number: int, settings: PluginSettings, rank: int) -> GuardSettings:
    return GuardSettings(
        identity=group.identity,
        size=PoolSize(
            num_pages=widths.num_pages,
            page_size=group.page_size,
            num_rows=widths.num_rows,
            most_pages=widths.most_pages[number],
            null_page=NULL_PAGE,
        ),
        mode=settings.mode,
        ring_lines=settings.ring_lines,
        incidents=path_of(settings.incidents, rank, number),
    )


def _num_bytes(widths: Widths) -> int:
    """Of all arrays that a worker makes."""
    return sum(widths.num_rows * most * _BYTES_A_PLACE + widths.num_pages * _BYTES_A_PAGE for most in widths.most_pages)


def _report_of(verdict: Verdict, group: int) -> StepReport:
    firsts = {
        name: min((one.evidence.index or 0 for one in verdict.violations if one.request == name), default=0)
        for name in verdict.aborted
    }
    return StepReport(
        ended=verdict.aborted,
        first_bad=tuple(FirstBad(request=name, group=group, index=first) for name, first in firsts.items()),
        spoiled=tuple(dict.fromkeys(_spoiled(verdict.violations, group))),
    )


def _spoiled(violations: Sequence[Violation], group: int) -> Iterator[Spoiled]:
    """For a write the generation of the page's record, whose holder was harmed; for a read what was expected."""
    for violation in violations:
        evidence = violation.evidence
        was = evidence.found if violation.check == "write" else evidence.expected
        if was is not None:
            yield Spoiled(group=group, page=evidence.page, generation=was.generation)
