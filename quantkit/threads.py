"""Run steps on a bounded number of threads, with all bookkeeping in the calling thread.

Threads and not processes: the kernels release the GIL, so that one process with one copy of everything keeps all
cores busy. What is in flight is bounded, so memory does not grow with the work.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

ReportProgress = Callable[[int, int], None]  # called with the source bytes just finished, and those in all
Step = Callable[[], Callable[[], None]]  # runs in a worker; what it returns runs in the calling thread
_IN_FLIGHT_PER_JOB = 2


def run_steps(steps: Iterable[Step], *, num_jobs: int, follow_ups: list[Step] | None = None) -> None:
    """Run every step, and whatever bookkeeping appends to ``follow_ups``.

    The first error cancels what has not begun, waits for what has, and is raised.
    """
    more: list[Step] = [] if follow_ups is None else follow_ups
    pending: set[Future[Callable[[], None]]] = set()
    pool = ThreadPoolExecutor(num_jobs, thread_name_prefix="quantkit")

    def settle() -> None:
        if pending:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            pending.difference_update(done)
            for future in done:
                future.result()()
        while more:
            pending.add(pool.submit(more.pop()))

    try:
        for step in steps:
            pending.add(pool.submit(step))
            while len(pending) >= num_jobs * _IN_FLIGHT_PER_JOB or more:
                settle()
        while pending or more:
            settle()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
