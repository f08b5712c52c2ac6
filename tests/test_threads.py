"""Steps on threads: in which order they are drawn, and that what is in flight is bounded."""

import threading
from collections import deque

from quantkit.threads import FollowUps, Step, run_steps


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


def test_the_first_of_the_feeds_in_turns_has_two_turns_in_a_round():
    drawn: list[str] = []

    def step_of(name: str) -> Step:
        return lambda: lambda: drawn.append(name)

    feeds = deque(iter([step_of(f"{name}{number}") for number in range(3)]) for name in "abc")
    more = FollowUps(feeds=feeds, width=2)
    more.work.append(step_of("single"))
    while (step := more.next_work()) is not None:
        step()()
    assert drawn == ["single", "a0", "b0", "a1", "a2", "b1", "b2", "c0", "c1", "c2"]
