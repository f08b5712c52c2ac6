"""A process that answers tasks, a line each way: what it imports it imports once."""

import atexit
import os
import subprocess
import sys
from collections.abc import Mapping


class LineProcess:
    """A program that reads tasks from stdin; it is started at the first, and anew behind one that it died of."""

    def __init__(self, program: str, environment: Mapping[str, str] = os.environ) -> None:
        self._program = program
        self._environment = environment
        self._running: subprocess.Popen[str] | None = None

    def ask(self, task: str) -> str:
        """Its answer to a task, without the line's end. Raises AssertionError where it ended instead."""
        if self._running is None:
            self._running = self._start()
        running = self._running
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(task + "\n")
        running.stdin.flush()
        answer = running.stdout.readline()
        if not answer:
            self._running = None
            raise AssertionError(f"{self._program} ended with {running.wait()}, and said why on stderr")
        return answer.rstrip("\n")

    def _start(self) -> "subprocess.Popen[str]":
        started = subprocess.Popen(
            [sys.executable, self._program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(self._environment),
            text=True,
        )
        atexit.register(_end, started)
        return started


def _end(running: "subprocess.Popen[str]") -> None:
    running.kill()
    running.communicate()
