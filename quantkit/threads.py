"""Run steps on a bounded number of threads, with all bookkeeping in the calling thread.

Threads and not processes: the kernels release the GIL, so that one process with one copy of everything keeps all
cores busy. What is in flight is bounded, so memory does not grow with the work.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from types import FrameType
from typing import Any

Step = Callable[[], Callable[[], None]]  # runs in a worker; what it returns runs in the calling thread
FETCHERS = "quantkit-fetch"  # how the names of threads begin that may wait for a network when all else has ended
_LOOK_SECONDS = 0.25  # for a signal, while nothing ends
_LAST_SECONDS = 2.0  # for those, to see that all ends
_IN_FLIGHT_PER_JOB = 2
_WAITING_FLUSHES = 8  # and one for each worker: a disk that is behind holds up what would open more files


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stretch of work that is measured: what goes on, its bytes in all, and those that an earlier run has done.

    ``step``: what each report has finished, where the bytes are run through a model: their speed says nothing.
    ``num_steps``: how many this run has to do, where that is known: time left then goes by them.
    """

    label: str
    total_bytes: int
    earlier_bytes: int = 0
    step: str = ""
    num_steps: int = 0


ReportProgress = Callable[[Stage, int], None]  # called with what goes on and the bytes just finished, first with none


class StoppedError(Exception):
    """Raised by a long step that has seen ``FollowUps.stop``: another error is on its way, and nobody sees this one."""


@dataclass(slots=True)
class FollowUps:
    """What bookkeeping makes possible: ``work`` and ``feeds`` of it for the workers, ``flush`` for one thread that
    waits for the disk, ``fetch`` for those that wait for the network. ``stop`` is set when everything ends early.

    ``width``: feeds that are drawn from in turns, of which the first has two in a round, so that they neither begin nor
    end together; the others follow.
    """

    work: deque[Step] = field(default_factory=deque)
    feeds: deque[Iterator[Step]] = field(default_factory=deque)
    flush: deque[Step] = field(default_factory=deque)
    fetch: deque[Step] = field(default_factory=deque)
    stop: Event = field(default_factory=Event)
    width: int = 1
    _turn: int = 0

    def next_work(self, *, with_feeds: bool = True) -> Step | None:
        """Single steps first, then those of the feeds."""
        if self.work:
            return self.work.popleft()
        while self.feeds and with_feeds:
            self._turn = (self._turn + 1) % (min(self.width, len(self.feeds)) + 1)
            place = max(self._turn - 1, 0)
            step = next(self.feeds[place], None)
            if step is not None:
                return step
            del self.feeds[place]
        return None


def run_steps(
    steps: Iterable[Step], *, num_jobs: int, follow_ups: FollowUps | None = None, num_fetchers: int = 1
) -> None:
    """Run every step, and whatever bookkeeping adds to ``follow_ups``.

    The first error cancels what has not begun, waits for what works or flushes, for the network only shortly, and is
    raised.
    """
    more = FollowUps() if follow_ups is None else follow_ups
    more.feeds.append(iter(steps))
    working: set[Future[Callable[[], None]]] = set()
    flushing: set[Future[Callable[[], None]]] = set()
    fetching: set[Future[Callable[[], None]]] = set()
    workers = ThreadPoolExecutor(num_jobs, thread_name_prefix="quantkit")
    flusher = ThreadPoolExecutor(1, thread_name_prefix="quantkit-flush")
    fetchers = ThreadPoolExecutor(num_fetchers, thread_name_prefix=FETCHERS)
    with _held_signals() as let_through:
        try:
            while True:
                let_through()
                is_behind = len(flushing) > num_jobs + _WAITING_FLUSHES
                while len(working) < num_jobs * _IN_FLIGHT_PER_JOB and (
                    step := more.next_work(with_feeds=not is_behind)
                ):
                    working.add(workers.submit(step))
                while more.flush:
                    flushing.add(flusher.submit(more.flush.popleft()))
                while more.fetch:
                    fetching.add(fetchers.submit(more.fetch.popleft()))
                if not (working or flushing or fetching):
                    break
                done, _ = wait(working | flushing | fetching, timeout=_LOOK_SECONDS, return_when=FIRST_COMPLETED)
                working -= done
                flushing -= done
                fetching -= done
                for future in done:
                    future.result()()
        except BaseException:
            more.stop.set()
            fetchers.shutdown(wait=False, cancel_futures=True)
            wait(flushing | fetching, timeout=_LAST_SECONDS)
            raise
        finally:
            workers.shutdown(wait=True, cancel_futures=True)
            flusher.shutdown(wait=True, cancel_futures=True)
            fetchers.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _held_signals() -> Iterator[Callable[[], None]]:
    """What would raise in the middle of anything waits for a call of the function that is yielded, or for the end.

    An exception inside an executor's ``submit`` leaves its lock taken, and its threads wait for that for ever. A second
    signal is not held: whoever sends it wants out at once.
    """
    pending: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def hold(number: int, frame: FrameType | None) -> None:
        pending.append((number, frame))
        if len(pending) > 1:
            let_through()

    def let_through() -> None:
        if pending:
            number, frame = pending[0]
            pending.clear()
            handlers[number](number, frame)

    if threading.current_thread() is threading.main_thread():
        for one in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(one)
            if callable(handler):
                handlers[one] = handler
                signal.signal(one, hold)
    try:
        yield let_through
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    let_through()
