"""What a worker receives: a scheduler's events, done in the order of the steps, and which request has which row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.kv_guard.engines.columns import columns_on
from quantkit.kv_guard.engines.vllm.events import GroupEvents, StepEvents
from quantkit.kv_guard.page_tags import PageTagTracker
from quantkit.kv_guard.tracker import Held, KvGuardError


class Receiver:
    """Of one worker, for the trackers of all its groups."""

    def __init__(self, trackers: Sequence[PageTagTracker], device: torch.device) -> None:
        self._trackers = trackers
        self._device = device
        self._rows: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._next = 0

    def receive(self, events: StepEvents) -> None:
        """Do what a step's events say. Raises KvGuardError for those of a step that is not the next."""
        if events.number != self._next:
            raise KvGuardError(
                f"events of step {events.number} came, {self._next} was next", remedy="restart the server"
            )
        self._next += 1
        self._apply(events)

    def rows_of(self, requests: Sequence[str]) -> Tensor:
        """On the device. Raises KvGuardError for a request that has none."""
        missing = [request for request in requests if request not in self._rows]
        if missing:
            raise KvGuardError(
                f"request {missing[0]} runs, and the scheduler has granted it nothing", remedy="restart the server"
            )
        return columns_on(self._device, [[self._rows[request] for request in requests]])[0]

    def _apply(self, events: StepEvents) -> None:
        columns = iter(columns_on(self._device, [column for group in events.groups for column in group.columns()]))
        parts = [_Parts.of(group, columns) for group in events.groups]
        for tracker, part in zip(self._trackers, parts, strict=True):
            if len(part.cached[0]):
                tracker.cache(*part.cached)
        for row in events.closed:
            del self._rows[self._names.pop(row)]
            for tracker in self._trackers:
                tracker.close(row)
        for tracker, part in zip(self._trackers, parts, strict=True):
            if len(part.released):
                tracker.release(part.released)
        for row, request in events.opened:
            self._rows[request], self._names[row] = row, request
            for tracker in self._trackers:
                tracker.open(row, request)
        for tracker, part, group in zip(self._trackers, parts, events.groups, strict=True):
            if len(part.granted[0]):
                pages, rows, indices, owners = part.granted
                tracker.grant(pages, rows, indices, owners, group.first_generation)
            if len(part.shared[0]):
                rows, indices, generations, owners = part.shared
                tracker.share(rows, indices, Held(generations=generations, owners=owners, indices=indices))


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
