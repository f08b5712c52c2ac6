"""Make the next thing while the present one is used."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Made = TypeVar("Made")


def ahead(makers: Iterable[Callable[[], Made]]) -> Iterator[Made]:
    """Results in order, each begun when the one before it is handed out.

    Two are alive at a time where the caller lets go of one before it asks for the next. An error is raised in its
    place. Nothing new is begun once the caller stops.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="quantkit-ahead") as pool:
        waiting = None
        for maker in makers:
            following = pool.submit(maker)
            if waiting is not None:
                try:
                    yield waiting.result()
                except BaseException:
                    following.cancel()
                    raise
            waiting = following
        if waiting is not None:
            yield waiting.result()
