#!/usr/bin/env python
"""What the KV guard costs where it is off: a host's step that asks `tracker.is_on` at each event, beside one without.

The step is a host's own bookkeeping for a batch: pages from a free list, rows of a page table, some requests that end.
Both functions are one source, of which the second lacks the lines that ask. They run in turns, and each pair gives a
ratio; +- is the standard error over pairs. Allocations are counted by tracemalloc, over as many steps.

    scripts/bench_kv_guard.py --requests 64
"""

import argparse
import inspect
import statistics
import sys
import textwrap
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from quantkit.kv_guard.tracker import NullTracker

PAGE_SIZE = 64
MOST_PAGES = 128


class Books:
    """Of an engine: free pages, and the pages and lengths of rows."""

    def __init__(self, num_requests: int) -> None:
        self.free = deque(range(num_requests * MOST_PAGES))
        self.rows: list[list[int]] = [[] for _ in range(num_requests)]
        self.lengths = [(37 * row) % (MOST_PAGES * PAGE_SIZE) for row in range(num_requests)]
        for row, length in enumerate(self.lengths):
            self.rows[row] = [self.free.popleft() for _ in range(-(-length // PAGE_SIZE))]


def run_step(books: Books, tracker: NullTracker) -> list[int]:
    """A token for each request; who is full ends, and another begins."""
    told = []
    for row in range(len(books.rows)):
        pages = books.rows[row]
        length = books.lengths[row] = books.lengths[row] + 1
        if length > MOST_PAGES * PAGE_SIZE:
            if tracker.is_on:
                told.append(row)
            books.free.extend(pages)
            if tracker.is_on:
                told.append(row)
            books.rows[row] = pages = []
            length = books.lengths[row] = 1
        if len(pages) * PAGE_SIZE < length:
            pages.append(books.free.popleft())
            if tracker.is_on:
                told.append(row)
    if tracker.is_on:
        told.append(len(books.rows))
    slots = [
        pages[-1] * PAGE_SIZE + (length - 1) % PAGE_SIZE
        for pages, length in zip(books.rows, books.lengths, strict=True)
    ]
    if tracker.is_on:
        told.append(len(slots))
    if tracker.is_on:
        told.append(len(slots))
    return slots


def without_questions(step: Callable[[Books, NullTracker], list[int]]) -> Callable[[Books, NullTracker], list[int]]:
    """The same function, less each question and the line that hangs on it."""
    lines = textwrap.dedent(inspect.getsource(step)).splitlines()
    asked = {at for at, line in enumerate(lines) if "tracker.is_on" in line}
    kept = [line for at, line in enumerate(lines) if at not in asked and at - 1 not in asked]
    made: dict[str, Callable[[Books, NullTracker], list[int]]] = {}
    exec("\n".join(kept), globals() | {"told": None}, made)
    assert len(asked) == 6
    return made[step.__name__]


def seconds_of(step: Callable[[Books, NullTracker], list[int]], num_requests: int, num_steps: int) -> float:
    """Of so many steps, from the same beginning."""
    books, tracker = Books(num_requests), NullTracker()
    begun = time.perf_counter()
    for _ in range(num_steps):
        step(books, tracker)
    return time.perf_counter() - begun


def allocated(step: Callable[[Books, NullTracker], list[int]], num_requests: int, num_steps: int) -> int:
    """The most bytes that were held beside what was there."""
    books, tracker = Books(num_requests), NullTracker()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    for _ in range(num_steps):
        step(books, tracker)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2_000, help="of each run")
    parser.add_argument("--pairs", type=int, default=60)
    options = parser.parse_args()
    plain = without_questions(run_step)
    assert plain(Books(options.requests), NullTracker()) == run_step(Books(options.requests), NullTracker())
    ratios, times = [], []
    for pair in range(options.pairs):
        order = (run_step, plain) if pair % 2 else (plain, run_step)
        taken = {step: seconds_of(step, options.requests, options.steps) for step in order}
        ratios.append(taken[run_step] / taken[plain])
        times.append(taken[plain] / options.steps)
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    step_us = statistics.median(times) * 1e6
    more_ns = (statistics.median(ratios) - 1) * step_us * 1e3
    print(f"with the guard off: {statistics.median(ratios):.4f} +- {error:.4f} of a step without it ({step_us:.1f} us)")
    print(f"{more_ns:.0f} ns a step of {options.requests} requests: {more_ns / 20e6:.1e} of a decode step of 20 ms")
    more = allocated(run_step, options.requests, 50) - allocated(plain, options.requests, 50)
    print(f"{more:+} bytes held at the most, and no launch: what asks never calls")


if __name__ == "__main__":
    main()
