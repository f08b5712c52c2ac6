"""Steps on threads: in which order they are drawn, and that what is in flight is bounded."""

import os
import signal
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest

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


class Watched(ThreadPoolExecutor):
    """Signals arrive while its lock may be taken."""

    is_inside, num_signals = False, 1

    def submit(self, step):
        Watched.is_inside = True
        for _ in range(Watched.num_signals):
            os.kill(os.getpid(), signal.SIGINT)
        Watched.num_signals = 0
        sum(range(1000))  # here the interpreter would look for signals
        Watched.is_inside = False
        return super().submit(step)


@pytest.mark.parametrize(("num_signals", "was_inside"), [(1, False), (2, True)])
def test_a_signal_never_raises_inside_an_executor_but_a_second_does(num_signals, was_inside, monkeypatch):
    """A lock that is left taken is waited for without end."""
    came = []

    def stop(*_):
        came.append(Watched.is_inside)
        raise KeyboardInterrupt

    monkeypatch.setattr("quantkit.threads.ThreadPoolExecutor", Watched)
    monkeypatch.setattr(Watched, "num_signals", num_signals)
    monkeypatch.setattr(Watched, "is_inside", False)
    before = signal.signal(signal.SIGINT, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_steps(((lambda: lambda: None) for _ in range(10)), num_jobs=2)
        assert signal.getsignal(signal.SIGINT) is stop
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == [was_inside]


def test_a_signal_is_seen_while_nothing_ends():
    """A step that waits for a network does not keep the program."""
    follow_ups = FollowUps()

    def fetch():
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        follow_ups.stop.wait(60)
        return lambda: None

    follow_ups.fetch.append(fetch)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_steps((), num_jobs=1, follow_ups=follow_ups)
    assert time.monotonic() - began < 30


def test_a_signal_at_the_very_end_is_not_lost(monkeypatch):
    def shut_down(executor, wait, cancel_futures):
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            monkeypatch.undo()
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shut_down)
    with pytest.raises(KeyboardInterrupt):
        run_steps((), num_jobs=1)
