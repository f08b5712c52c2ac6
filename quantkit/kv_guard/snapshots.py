"""The ring of a step on its way to the host: copied behind the step, read when its result is."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.kv_guard.dispatch import Ring


class Stopwatch:
    """Time of what runs inside, on the device: events of its stream, or the clock where it is the CPU."""

    def __init__(self, on: Tensor) -> None:
        self._is_cuda = on.is_cuda
        self._spans: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self._spans.append((self._now(), None))

    def __exit__(self, *_: object) -> None:
        self._spans[-1] = (self._spans[-1][0], self._now())

    def take(self) -> "Spans":
        """What was measured since the last time."""
        spans, self._spans = self._spans, []
        return Spans(tuple(spans), self._is_cuda)

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass(frozen=True, slots=True)
class Spans:
    """Begin and end of each check of a step."""

    spans: tuple[tuple[Any, Any], ...]
    is_cuda: bool

    @property
    def seconds(self) -> float:
        """Together; of events only when they have passed."""
        if self.is_cuda:
            return float(sum(begun.elapsed_time(ended) for begun, ended in self.spans)) / 1000
        return float(sum(ended - begun for begun, ended in self.spans))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the ring held behind a step, and ``names`` by openings. ``ready`` is the event of the copy, None where it is
    done."""

    step: int
    num_checked: int
    names: Mapping[int, str]
    count: Tensor
    lines: Tensor
    ready: Any
    timing: Spans

    def wait(self) -> None:
        """At the result of the step, which was copied later in the same stream, there is nothing to wait for."""
        if self.ready is not None:
            self.ready.synchronize()


def copy_ring(ring: Ring) -> tuple[Tensor, Tensor, Any]:
    """Count and lines on the host, and the event after which they are there; the ring begins anew behind it."""
    copied: tuple[Tensor, Tensor, Any]
    if not ring.count_1.is_cuda:
        copied = ring.count_1.clone(), ring.lines_KW.clone(), None
    else:
        count, lines = (
            torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True)
            for one in (ring.count_1, ring.lines_KW)
        )
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        copied = count, lines, ready
    ring.count_1.zero_()
    return copied
