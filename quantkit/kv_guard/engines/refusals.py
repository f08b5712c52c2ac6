"""What follows where a guard cannot go on: the one place that decides between ending a server and guarding nothing."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quantkit.errors import install_remedy
from quantkit.kv_guard.tracker import KvGuardError, Mode


class Refusals:
    """Of one guard. ``is_off``: nothing is checked from here on, and half a guard would raise false alarms."""

    def __init__(self, mode: Mode, log: logging.Logger) -> None:
        self._mode = mode
        self._log = log
        self.is_off = False
        self._when_off: list[Callable[[], None]] = []

    def when_off(self, act: Callable[[], None]) -> None:
        """What has to be done when the guard goes off, once."""
        self._when_off.append(act)

    def refuse(self, error: KvGuardError) -> None:
        """Raise where a server must not run unguarded; else say so, once, and be off."""
        if self._mode.is_strict:
            raise error
        if self.is_off:
            return
        self.is_off = True
        self._log.error("the KV guard is off from here on: %s", error)
        for act in self._when_off:
            act()

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse for what is raised inside, the verdict of mode halt included."""
        try:
            yield
        except KvGuardError as error:
            self.refuse(error)
        except ImportError as error:
            is_engine = (error.name or "").partition(".")[0] in ("sglang", "vllm")
            remedy = "load the guard in the engine's environment" if is_engine else install_remedy("kv-guard")
            self.refuse(KvGuardError(f"it cannot be loaded: {error}", remedy=remedy))
