"""What is kept of what a tracker finds: lines in the engine's log, metrics, and the pool at its first violation."""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from quantkit.errors import QuantkitError
from quantkit.kv_guard.dump import Dump, write_dump
from quantkit.kv_guard.engines.metrics_file import MetricsFile
from quantkit.kv_guard.engines.settings import PluginSettings, path_of
from quantkit.kv_guard.metrics import Metrics
from quantkit.kv_guard.page_tags import PageTagTracker
from quantkit.kv_guard.tracker import Step, Verdict

_MOST_LOGGED = 8


class Logbook:
    """Of one tracker. ``lock`` is held by whoever tells the tracker of pages, where verdicts are another thread's."""

    def __init__(
        self,
        tracker: PageTagTracker,
        settings: PluginSettings,
        log: logging.Logger,
        place: tuple[int, int],
        lock: "AbstractContextManager[object] | None" = None,
    ) -> None:
        """``place``: rank and group of layers."""
        self._rank, self._group = place
        self._tracker = tracker
        self._log = log
        self._lock = lock or nullcontext()
        self._metrics_file = MetricsFile(path_of(settings.metrics, self._rank, self._group))
        self._dump = path_of(settings.dump, self._rank, self._group)  # None when it was written
        self._step: Step | None = None
        self._is_attached = True
        self._metrics_file.write_at_once(self._text)
        # nothing else tells an operator: an engine that passes a plugin over says nothing of it
        guarded = tracker.settings
        where = f"rank {self._rank}, group {self._group}"
        log.info("KV guard: on, mode %s, %s, %d pages", guarded.mode, where, guarded.size.num_pages)

    def detach(self) -> None:
        """The guard goes off: what is told from here on says so."""
        self._is_attached = False
        self._metrics_file.write_at_once(self._text)

    def before_step(self, step: Step) -> int:
        """As the tracker's, and the step is remembered."""
        self._step = step
        return self._tracker.before_step(step)

    def verdict(self, number: int) -> Verdict:
        """As the tracker's, which raises in mode halt: what was found is written before it does."""
        metrics = self._tracker.metrics
        before = _num_found(metrics)
        try:
            verdict = self._tracker.verdict(number)
        finally:
            has_found = _num_found(metrics) > before
            if has_found:
                self._metrics_file.write_at_once(self._text)
                self._write_dump()
            else:
                self._metrics_file.write(self._text)
        self._tell(verdict)
        return verdict

    def _text(self) -> str:
        return self._tracker.metrics.text(rank=self._rank, is_attached=self._is_attached)

    def _tell(self, verdict: Verdict) -> None:
        where = f"KV guard, step {verdict.step}, group {self._group}"
        for violation in verdict.violations[:_MOST_LOGGED]:
            self._log.error("%s: %s", where, violation.text)
        if (more := len(verdict.violations) - _MOST_LOGGED) > 0:
            self._log.error("%s: %d more violations", where, more)
        if verdict.lost:
            self._log.error("%s: %d more violations had no room in the ring", where, verdict.lost)

    def _write_dump(self) -> None:
        """Of the pool as it is by now, with the step that was launched last. Waits for the device, and once only."""
        if self._dump is None or self._step is None:
            return
        path, self._dump = self._dump, None
        try:
            with self._lock:
                path = _write(path, self._tracker, self._step)
        except (QuantkitError, OSError, SafetensorError) as error:  # no reason to end a server that serves
            self._log.error("KV guard: the pool was not dumped to %s: %s", path, error)
        else:
            self._log.error("KV guard: the pool was dumped; look at it with `quantkit kv-guard inspect %s`", path)


def _write(path: Path, tracker: PageTagTracker, step: Step) -> Path:
    """Where it lies: what an earlier server found stays beside it.

    Of the table what the step may read: it has a column for every token of the longest context.
    """
    size = tracker.settings.size
    width = step.most_pages * (size.page_size if step.by_token else 1)
    if step.table.is_cuda:
        torch.cuda.synchronize(step.table.device)
    dump = Dump.of(tracker, replace(step, table=step.table[:, :width]))
    return write_dump(path, dump, is_numbered=True)


def _num_found(metrics: Metrics) -> int:
    return metrics.lost + sum(metrics.violations.values())
