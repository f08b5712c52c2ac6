"""The worker's side in vLLM: what a step will read is checked before it and behind it, group by group."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from quantkit.kv_guard.engines.logbook import Logbook
from quantkit.kv_guard.engines.refusals import Refusals
from quantkit.kv_guard.engines.settings import PluginSettings
from quantkit.kv_guard.engines.vllm.events import EVENTS, StepEvents, StepReport
from quantkit.kv_guard.engines.vllm.receiver import Receiver
from quantkit.kv_guard.engines.vllm.reports import GuardedOutput, report_of
from quantkit.kv_guard.engines.vllm.settings import Group
from quantkit.kv_guard.engines.vllm.trackers import Widths, trackers_of
from quantkit.kv_guard.tracker import KvGuardError, Step

_LOG = logging.getLogger("vllm.quantkit_kv_guard")


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
        self._must_be_told = False
        self.is_told = False  # of the step that is being run
        self._launched: tuple[int, ...] | None = None
        self._finished: deque[tuple[int, ...]] = deque()
        self.trackers = trackers_of(groups, widths, settings, device, rank)
        self._receiver = Receiver(self.trackers, device)
        self._token_numbers = torch.arange(widths.most_tokens, device=device)
        self._tables = [
            torch.zeros(widths.num_rows, most, dtype=torch.int32, device=device) for most in widths.most_pages
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
                self._receiver.receive(events)
                self._must_be_told = self.is_told = True
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
        return GuardedOutput(output, partial(self._report, self._finished.popleft()))

    def _report(self, numbers: Sequence[int]) -> StepReport | None:
        """Of a step, when its result is at hand; None where the guard goes off. Raises KvGuardError in mode halt."""
        report = StepReport()
        with self.refusals.refusing():
            for group, (logbook, number) in enumerate(zip(self._logbooks, numbers, strict=True)):
                report = report.together(report_of(logbook.verdict(number), group))
            return report
        return None

    def _launch(self, batch: Batch) -> tuple[int, ...]:
        """The step's number of each tracker."""
        rows = self._receiver.rows_of(batch.requests)
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
