"""Tells errors of what is ours, and is called while a layer of transformers runs, from errors of that layer."""

from collections.abc import Iterator
from contextlib import contextmanager


class OwnErrors:
    """Of one run of a layer. What observers and stand-ins do is done within ``noted``."""

    def __init__(self) -> None:
        self._seen: list[Exception] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """An error that ends the block is ours."""
        try:
            yield
        except Exception as error:
            self._seen.append(error)
            raise

    def __contains__(self, error: Exception) -> bool:
        return any(error is one for one in self._seen)
