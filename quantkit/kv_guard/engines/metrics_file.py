"""Metrics in a file that a node exporter's text collector reads, written anew now and then."""

import logging
import time
from pathlib import Path

from quantkit.kv_guard.metrics import Metrics

_SECONDS_BETWEEN = 10.0
_log = logging.getLogger(__name__)


class MetricsFile:
    """No path, no file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._due = 0.0

    def write(self, metrics: Metrics, *, at_once: bool = False) -> None:
        """Whole or not at all, and seldom: this is the thread that schedules requests.

        ``at_once`` where something was found, since the server may have no other step for hours.
        """
        now = time.monotonic()
        if self._path is None or (now < self._due and not at_once):
            return
        self._due = now + _SECONDS_BETWEEN
        partial = self._path.with_name(self._path.name + ".partial")
        try:
            partial.write_text(metrics.text(), encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:  # no reason to end a server that serves
            _log.error("KV guard: metrics were not written: %s", error)
