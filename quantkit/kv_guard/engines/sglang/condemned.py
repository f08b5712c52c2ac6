"""Requests to end: who was found wrong, until its row is given back."""

from collections.abc import Iterable

from quantkit.kv_guard.tracker import Mode


class Condemned:
    """By name. Empty but in mode abort: in the others no request is ended alone."""

    def __init__(self, mode: Mode) -> None:
        self._is_kept = mode is Mode.ABORT
        self._requests: set[str] = set()

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, requests: Iterable[str]) -> None:
        """They are ended where their next tokens are processed."""
        if self._is_kept:
            self._requests.update(requests)

    def let_go(self, request: str) -> None:
        """It has ended, or begins anew with pages of its own; one that was not condemned stays so."""
        self._requests.discard(request)
