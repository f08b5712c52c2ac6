"""What becomes of the ring of a step: read when the step's result is, counted, written down, and told."""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from quantkit.kv_guard.dispatch import Ring
from quantkit.kv_guard.incidents import IncidentFile
from quantkit.kv_guard.metrics import Metrics
from quantkit.kv_guard.openings import Openings
from quantkit.kv_guard.settings import GuardSettings
from quantkit.kv_guard.snapshots import Snapshot, Stopwatch, copy_ring
from quantkit.kv_guard.tracker import KvGuardError, Mode, Verdict, aborted_requests
from quantkit.kv_guard.violations import Violation, read_line

MOST_WAITING = 64  # engines are a few steps ahead of their results; each that waits keeps its ring, of 32 KiB
_log = logging.getLogger(__name__)


class Verdicts:
    """Of one pool. ``step`` is the number of the step that is checked now."""

    def __init__(self, settings: GuardSettings, ring: Ring, on: Tensor) -> None:
        self._settings = settings
        self._ring = ring
        self.metrics = Metrics(settings.identity)
        self._incidents = IncidentFile(settings.incidents, settings.identity)
        self.openings = Openings()
        self.step = 0
        self.stopwatch = Stopwatch(on)
        self._num_checked = 0
        self._snapshots: deque[Snapshot] = deque()
        self._owed: dict[str, None] = {}  # requests to end whose verdict nobody asked for, in order

    def count_checked(self, num_pages: int) -> None:
        """Pages that were checked in this step."""
        self._num_checked += num_pages

    def close_step(self) -> None:
        """What the ring holds is on its way to the host; the next step begins. Too many that wait are too old."""
        self._snapshots.append(self._snapshot())
        self._num_checked = 0
        self.step += 1
        if len(self._snapshots) > MOST_WAITING:
            self._pass_over()

    def of(self, step: int) -> Verdict:
        """Of a step that was closed. Raises KvGuardError for another, and in mode halt for a violation."""
        while self._snapshots and self._snapshots[0].step < step:
            self._pass_over()
        if not self._snapshots or self._snapshots[0].step != step:
            raise KvGuardError(f"step {step} was not checked, or its verdict was read", remedy="call after_step first")
        return self._with_owed(self._read(self._snapshots.popleft()))

    def settle(self) -> Verdict:
        """Of all since the last step."""
        return self._with_owed(self._read(self._snapshot()))

    def _pass_over(self) -> None:
        """The oldest, whose result the engine threw away; whom it names is ended all the same."""
        self._owed |= dict.fromkeys(self._read(self._snapshots.popleft()).aborted)

    def _with_owed(self, verdict: Verdict) -> Verdict:
        owed, self._owed = self._owed, {}
        return replace(verdict, aborted=tuple(owed | dict.fromkeys(verdict.aborted)))

    def _snapshot(self) -> Snapshot:
        count, lines, ready = copy_ring(self._ring)
        return Snapshot(
            step=self.step,
            num_checked=self._num_checked,
            names=self.openings.take(),
            count=count,
            lines=lines,
            ready=ready,
            timing=self.stopwatch.take(),
        )

    def _read(self, snapshot: Snapshot) -> Verdict:
        snapshot.wait()
        count = int(snapshot.count[0])
        kept = snapshot.lines[: min(count, self._ring.num_lines)].tolist()
        violations = tuple(self._violation(line, snapshot.names) for line in kept)
        lost = count - len(violations)
        aborted = aborted_requests(violations, self._settings.mode, lost=lost, requests=snapshot.names.values())
        verdict = Verdict(step=snapshot.step, violations=violations, lost=lost, aborted=aborted)
        self.metrics.count(verdict, num_pages=snapshot.num_checked, seconds=snapshot.timing.seconds)
        self._write_down(violations)
        if count and self._settings.mode is Mode.HALT:
            raise KvGuardError(
                f"step {snapshot.step}: {count} violations, the first: {violations[0].text}",
                remedy=self._remedy(),
            )
        return verdict

    def _remedy(self) -> str:
        if self._settings.incidents is None:
            return "name a file for `incidents`, so that `quantkit kv-guard explain` can say more the next time"
        return f"read it with `quantkit kv-guard explain {self._settings.incidents}`"

    def _write_down(self, violations: tuple[Violation, ...]) -> None:
        """A file that cannot be written ends no server: it is said, and counted."""
        try:
            self._incidents.write(violations)
        except (OSError, ValueError) as error:  # of a path that no file can have, too
            self.metrics.unwritten += len(violations)
            _log.error("KV guard: %s incidents are not written down: %s", len(violations), error)

    def _violation(self, line: list[int], names: Mapping[int, str]) -> Violation:
        size = self._settings.size
        return read_line(line, names, num_pages=size.num_pages, page_size=size.page_size)
