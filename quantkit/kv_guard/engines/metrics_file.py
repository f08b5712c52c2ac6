"""Metrics in a file that a node exporter's text collector reads, written anew now and then."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock

_SECONDS_BETWEEN = 10.0
_log = logging.getLogger(__name__)


class MetricsFile:
    """No path, no file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._due = 0.0
        self._lock = Lock()  # a guard goes off in one thread, and verdicts may be another's

    def write(self, text: Callable[[], str]) -> None:
        """Seldom: this is the thread that schedules requests."""
        now = time.monotonic()
        if self._path is not None and now >= self._due:
            self._due = now + _SECONDS_BETWEEN
            self.write_at_once(text)

    def write_at_once(self, text: Callable[[], str]) -> None:
        """Whole or not at all; where something happened, since the server may have no other step for hours."""
        if self._path is None:
            return
        partial = self._path.with_name(self._path.name + ".partial")
        try:
            with self._lock:
                partial.write_text(text(), encoding="utf-8")
                partial.replace(self._path)
        except OSError as error:  # no reason to end a server that serves
            _log.error("KV guard: metrics were not written: %s", error)
