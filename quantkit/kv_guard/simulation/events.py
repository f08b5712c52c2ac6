"""What the engine tells the guard, in the order of its stream; grants, and releases, that follow each other are one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantkit.kv_guard.simulation.content import Content
from quantkit.kv_guard.simulation.requests import Request
from quantkit.kv_guard.simulation.stream import Stream
from quantkit.kv_guard.simulation.tree import Node
from quantkit.kv_guard.simulation.watched import Known, Watched


def numbers(values: Sequence[int]) -> Tensor:
    """int64."""
    return torch.tensor(values, dtype=torch.int64)


class Events:
    """Where the tracker is off nothing is told, and what engines do anyway is all that is left."""

    def __init__(self, stream: Stream, tracker: Watched, content: Content, *, is_summed: bool) -> None:
        self._stream = stream
        self._tracker = tracker
        self._content = content
        self._is_summed = is_summed  # pages, on the way
        self._granted: list[tuple[int, int, int, int]] = []
        self._released: list[int] = []

    @property
    def is_on(self) -> bool:
        """The one question before anything is gathered."""
        return self._tracker.is_on

    def open(self, row: int, request: str) -> None:
        self._put(lambda tracker: tracker.open(row, request))

    def close(self, row: int) -> None:
        self._put(lambda tracker: tracker.close(row))

    def grant(self, pages: Sequence[int], row: int, first: int, owners: Sequence[int]) -> None:
        """Pages of one row from logical page ``first`` on."""
        if self._released:
            self.flush()
        self._granted += [
            (page, row, first + at, owner) for at, (page, owner) in enumerate(zip(pages, owners, strict=True))
        ]

    def release(self, pages: Sequence[int]) -> None:
        if self._granted:
            self.flush()
        self._released += pages

    def flush(self) -> None:
        """What was gathered goes to the stream."""
        granted, released = self._granted, self._released
        self._granted, self._released = [], []
        tracker = self._tracker
        if not tracker.is_on:
            return
        if granted:
            pages, rows, indices, owners = (numbers(part) for part in zip(*granted, strict=True))
            self._stream.put(lambda: tracker.grant(pages, rows, indices, owners))
        if released:
            gone = numbers(released)
            self._stream.put(lambda: tracker.release(gone))

    def cache(self, node: Node, row: int) -> None:
        """The pages that a row gave to a node."""
        pages, rows, indices = _places(node, row)

        def run(tracker: Watched) -> None:
            node.held = tracker.cache(pages, rows, indices)

        self._put(run)

    def share(self, node: Node, row: int) -> None:
        """A node's pages begin a row."""
        _, rows, indices = _places(node, row)

        def run(tracker: Watched) -> None:
            assert node.held is not None, "the node was never cached"
            tracker.share(rows, indices, node.held)

        self._put(run)

    def split(self, front: Node, back: Node, count: int) -> None:
        """What a node held is what its parts hold."""

        def run(_: Watched) -> None:
            if back.held is not None:
                front.held, back.held = back.held[:count], back.held[count:]

        self._put(run)

    def fork(self, row: int, to_row: int, pages: Sequence[int]) -> None:
        self._put(lambda tracker: tracker.fork(row, to_row, numbers(pages)))

    def copied(self, page: int, row: int, index: int, to_row: int) -> None:
        """One page, for another row."""
        parts = [numbers([value]) for value in (page, row, index, to_row)]
        self._put(lambda tracker: tracker.copied(*parts))

    def move(self, sources: Sequence[int], targets: Sequence[int], row: int, first: int) -> None:
        """Pages of one row."""
        parts = numbers(sources), numbers(targets), numbers([row] * len(sources)), _from(first, len(sources))
        self._put(lambda tracker: tracker.move(*parts))

    def truncate(self, row: int, num_pages: int) -> None:
        self._put(lambda tracker: tracker.truncate(numbers([row]), numbers([num_pages])))

    def prune(self, row: int, first: int) -> None:
        self._put(lambda tracker: tracker.prune(numbers([row]), numbers([first])))

    def reserve(self, pages: Sequence[int], transfer: int) -> None:
        self._put(lambda tracker: tracker.reserve(numbers(pages), transfer))

    def announce(self, pages: Sequence[int], transfer: int) -> None:
        self._put(lambda tracker: tracker.announce(numbers(pages), transfer))

    def drained(self, pages: Sequence[int], transfer: int) -> None:
        self._put(lambda tracker: tracker.drained(numbers(pages), transfer))

    def hold(self, pages: Sequence[int], row: int, to: Callable[[Known], object]) -> None:
        """All pages of a row are written no more, and will be sent."""
        rows, indices = numbers([row] * len(pages)), _from(0, len(pages))
        self._put(lambda tracker: to(tracker.cache(numbers(pages), rows, indices)))

    def send(self, pages: Sequence[int], held: Callable[[], Known]) -> None:
        """What is sent is known when the stream gets there."""
        self._put(lambda tracker: tracker.send(numbers(pages), held(), self._sums(pages)))

    def sent(self, pages: Sequence[int], held: Callable[[], Known]) -> None:
        self._put(lambda tracker: tracker.sent(numbers(pages), held()))

    def arrive(self, pages: Sequence[int], request: Request, first: int) -> None:
        """Pages of a prompt, from logical page ``first`` on."""
        rows, indices = numbers([request.row] * len(pages)), _from(first, len(pages))
        words_T = request.words[first * self._content.page_size : request.num_prompt]

        def run(tracker: Watched) -> None:
            is_right = self._content.holds(numbers(pages), words_T)
            tracker.arrive(numbers(pages), rows, indices, is_right, self._sums(pages))

        self._put(run)

    def store(self, node: Node, held: Known | None) -> None:
        """A node's pages have come back from the host's memory."""
        pages = list(node.pages or [])

        def run(tracker: Watched) -> None:
            assert held is not None, "the host's memory holds it"
            is_right = self._content.holds(numbers(pages), node.words())
            node.held = tracker.store(numbers(pages), held, is_right, self._sums(pages))

        self._put(run)

    def _sums(self, pages: Sequence[int]) -> Tensor | None:
        return self._content.checksums.of(numbers(pages)) if self._is_summed else None

    def _put(self, run: Callable[[Watched], object]) -> None:
        self.flush()
        tracker = self._tracker
        if tracker.is_on:
            self._stream.put(lambda: run(tracker))


def _from(first: int, count: int) -> Tensor:
    return torch.arange(first, first + count)


def _places(node: Node, row: int) -> tuple[Tensor, Tensor, Tensor]:
    pages = node.pages or []
    return numbers(pages), numbers([row] * len(node.keys)), _from(node.first, len(node.keys))
