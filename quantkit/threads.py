"""Run steps on a bounded number of threads, with all bookkeeping in the calling thread.

Threads and not processes: the kernels release the GIL, so that one process with one copy of everything keeps all
cores busy. What is in flight is bounded, so memory does not grow with the work.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

ReportProgress = Callable[[int, int], None]  # called with the source bytes just finished, and those in all
Step = Callable[[], Callable[[], None]]  # runs in a worker; what it returns runs in the calling thread
_IN_FLIGHT_PER_JOB = 2


@dataclass(slots=True)
class FollowUps:
    """What bookkeeping makes possible: ``work`` for the workers, ``flush`` for one thread that waits for the disk."""

    work: list[Step] = field(default_factory=list)
    flush: list[Step] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.work or self.flush)


def run_steps(steps: Iterable[Step], *, num_jobs: int, follow_ups: FollowUps | None = None) -> None:
    """Run every step, and whatever bookkeeping adds to ``follow_ups``.

    The first error cancels what has not begun, waits for what has, and is raised.
    """
    more = FollowUps() if follow_ups is None else follow_ups
    working: set[Future[Callable[[], None]]] = set()
    flushing: set[Future[Callable[[], None]]] = set()
    workers = ThreadPoolExecutor(num_jobs, thread_name_prefix="quantkit")
    flusher = ThreadPoolExecutor(1, thread_name_prefix="quantkit-flush")

    def settle() -> None:
        if working or flushing:
            done, _ = wait(working | flushing, return_when=FIRST_COMPLETED)
            working.difference_update(done)
            flushing.difference_update(done)
            for future in done:
                future.result()()
        while more.work:
            working.add(workers.submit(more.work.pop()))
        while more.flush:
            flushing.add(flusher.submit(more.flush.pop()))

    try:
        for step in steps:
            working.add(workers.submit(step))
            while len(working) >= num_jobs * _IN_FLIGHT_PER_JOB or more:
                settle()
        while working or flushing or more:
            settle()
    finally:
        workers.shutdown(wait=True, cancel_futures=True)
        flusher.shutdown(wait=True, cancel_futures=True)
