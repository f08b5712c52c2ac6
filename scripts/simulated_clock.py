"""Threads without waiting: the executor of quantkit.threads on a clock that jumps to the next thing that ends.

A step runs at once, when it is submitted, and says by ``Clock.spend`` what it would have cost; what it returns is
booked when the clock has come that far. Bandwidths are shared in turns: two transfers take as long as one by one.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass(eq=False)
class Future:
    """What ``submit`` gives: its result, and when it ends."""

    result_of: Any
    ends: float

    def result(self) -> Any:
        return self.result_of


@dataclass
class Clock:
    """Seconds. ``busy_until``: of each resource that serves one after another, by name."""

    now: float = 0.0
    busy_until: dict[str, float] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)  # per resource, and "core"
    _ends: float = 0.0

    def spend(self, resource: str, seconds: float) -> None:
        """The step that is running needs a core (its own), or a resource that it shares, for so long."""
        self.spent[resource] = self.spent.get(resource, 0.0) + seconds
        if resource == "core":
            self._ends += seconds
        else:
            self.busy_until[resource] = max(self._ends, self.busy_until.get(resource, 0.0)) + seconds
            self._ends = self.busy_until[resource]

    @property
    def at(self) -> float:
        """How far the step that is running has come."""
        return self._ends

    def wait(self, until: float) -> None:
        """The step that is running goes on then, at the earliest."""
        self._ends = max(self._ends, until)

    def spend_together(self, seconds: Mapping[str, float]) -> None:
        """Several resources at once: the step goes on when the last is done."""
        start, ends = self._ends, self._ends
        for resource, needed in seconds.items():
            self._ends = start
            self.spend(resource, needed)
            ends = max(ends, self._ends)
        self._ends = ends

    def run(self, step: Callable[[], Any], start: float) -> Future:
        """Run a step as if it began at ``start``."""
        self._ends = start
        result = step()
        return Future(result, self._ends)


class Executor:
    """Stands in for ThreadPoolExecutor."""

    clock: Clock

    def __init__(self, num_workers: int, thread_name_prefix: str = "") -> None:
        self._free = [0.0] * num_workers

    def submit(self, step: Callable[[], Any]) -> Future:
        start = max(heapq.heappop(self._free), self.clock.now)
        future = self.clock.run(step, start)
        heapq.heappush(self._free, future.ends)
        return future

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        pass


def patched(clock: Clock, costs: Iterable[tuple[str, Any]]) -> AbstractContextManager[pytest.MonkeyPatch]:
    """Puts the clock and the costs (dotted name, replacement) in the place of threads and work."""

    class Context:
        def __enter__(self) -> pytest.MonkeyPatch:
            self.patch = pytest.MonkeyPatch()
            self.patch.setattr("quantkit.threads.ThreadPoolExecutor", type("Executor", (Executor,), {"clock": clock}))
            self.patch.setattr("quantkit.threads.wait", wait)
            for name, replacement in costs:
                self.patch.setattr(name, replacement)
            return self.patch

        def __exit__(self, *_: object) -> None:
            self.patch.undo()

    def wait(futures: set[Future], return_when: str = "", timeout: float = 0) -> tuple[set[Future], None]:
        clock.now = max(clock.now, min(future.ends for future in futures))
        return {future for future in futures if future.ends <= clock.now}, None

    return Context()
