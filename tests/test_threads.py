"""Steps on threads: what is in flight is bounded, whatever is slow."""

import threading

from quantkit.threads import FollowUps, run_steps


def test_a_slow_disk_holds_up_what_would_open_more_files():
    """Each step leaves a flush behind, and no flush ends before as many wait as ever will."""
    num_steps, num_jobs = 500, 2
    follow_ups, opened, most, release = FollowUps(), 0, 0, threading.Event()
    closed = 0

    def flush():
        release.wait(0.05)

        def book():
            nonlocal closed
            closed += 1

        return book

    def steps():
        nonlocal opened, most
        for _ in range(num_steps):
            opened += 1
            most = max(most, opened - closed)
            if closed > 20:
                release.set()
            yield lambda: lambda: follow_ups.flush.append(flush)

    run_steps(steps(), num_jobs=num_jobs, follow_ups=follow_ups)
    assert closed == opened == num_steps
    assert most < 30
