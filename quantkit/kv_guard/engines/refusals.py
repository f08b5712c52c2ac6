"""What follows where a guard cannot go on: the one place that decides between ending a server and guarding nothing."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from quantkit.kv_guard.tracker import KvGuardError, Mode


class Refusals:
    """Of one guard. ``is_off``: nothing is checked from here on, and half a guard would raise false alarms."""

    def __init__(self, mode: Mode, log: logging.Logger) -> None:
        self._mode = mode
        self._log = log
        self.is_off = False

    def refuse(self, error: KvGuardError) -> None:
        """Raise where a server must not run unguarded; else say so, once, and be off."""
        if self._mode.is_strict:
            raise error
        if not self.is_off:
            self._log.error("the KV guard is off from here on: %s", error)
        self.is_off = True

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse for what is raised inside, the verdict of mode halt included."""
        try:
            yield
        except KvGuardError as error:
            self.refuse(error)
