"""One engine: its pool, its books, what the guard knows of them, and how requests get rows and pages."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from quantkit.kv_guard.identity import PoolIdentity
from quantkit.kv_guard.page_tags import new_tracker
from quantkit.kv_guard.settings import GuardSettings, PoolSize
from quantkit.kv_guard.simulation.allocator import NULL_PAGE, FreePages, RowTable
from quantkit.kv_guard.simulation.content import Content
from quantkit.kv_guard.simulation.events import Events, numbers
from quantkit.kv_guard.simulation.judge import Judge
from quantkit.kv_guard.simulation.requests import Request, State, Traffic
from quantkit.kv_guard.simulation.shapes import EngineShape
from quantkit.kv_guard.simulation.stream import Beside, Stream
from quantkit.kv_guard.simulation.tree import Node, Tree
from quantkit.kv_guard.simulation.watched import Watched
from quantkit.kv_guard.tracker import Mode, Tracker

if TYPE_CHECKING:
    from quantkit.kv_guard.simulation.host_tier import HostTier
    from quantkit.kv_guard.simulation.steps import Launched

_RING_LINES = 2048

MakeGuard = Callable[[GuardSettings], Tracker]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the engines of a world have in common. ``make_guard`` makes their trackers."""

    random: Random
    beside: Beside
    judge: Judge
    make_guard: MakeGuard = new_tracker
    content: bool = True
    transfers: Iterator[int] = field(default_factory=lambda: count(1))  # their numbers


def settings_of(shape: EngineShape, num_pages: int, first_generation: int) -> GuardSettings:
    """Of a pool's guard: violations end requests."""
    layout = f"simulated, pages of {shape.page_size}"
    size = PoolSize(
        num_pages=num_pages,
        page_size=shape.page_size,
        num_rows=shape.num_rows,
        most_pages=shape.most_pages,
        null_page=NULL_PAGE,
    )
    return GuardSettings(
        secret=b"of a simulation",
        identity=PoolIdentity(model="simulated", layout=layout),
        size=size,
        mode=Mode.ABORT,
        ring_lines=_RING_LINES,
        first_generation=first_generation,
    )


def watched(shape: EngineShape, num_pages: int, first_generation: int, around: Surroundings) -> Watched:
    """The guard of a pool, and what is true of it."""
    settings = settings_of(shape, num_pages, first_generation)
    return Watched(around.make_guard(settings), settings.size)


class Engine:
    """State alone; what happens to it is in admission.py, memory.py, steps.py and results.py."""

    def __init__(self, name: str, shape: EngineShape, around: Surroundings, traffic: Traffic | None = None) -> None:
        self.name = name
        self.shape = shape
        self.around = around
        self.judge = around.judge
        self.traffic = traffic  # forks are requests, too
        self.content = Content(shape.num_pages, shape.page_size, around.random.getrandbits(31))
        # soon counted round, here where numbers become negative and there where they begin anew
        first = (1 << 64 if shape.decodes else 1 << 63) - 5 * shape.num_pages
        self.tracker = watched(shape, shape.num_pages, first, around)
        self.stream = Stream(around.beside)
        self.events = Events(self.stream, self.tracker, self.content, is_summed=around.content)
        self.free_pages = FreePages(shape.num_pages, self.events.release)
        self.rows = RowTable(shape)
        self.host: HostTier | None = None
        self.padding_slot = -1  # of tokens that fill a batch up
        self.num_checks = self.num_steps = 0
        self.begin()

    def begin(self) -> None:
        """With no request and an empty cache."""
        self.tree = Tree(self.events.split)
        self.waiting: deque[Request] = deque()
        self.loading: list[tuple[Request, Node]] = []
        self.arriving: list[Request] = []
        self.running: list[Request] = []
        self.sending: list[Request] = []
        self.launched: deque[Launched] = deque()
        self.named: dict[str, Request] = {}

    def restart(self) -> None:
        """As an operator does it: whatever was is dropped, and the pages are free."""
        self.stream.run_all()
        self.events.flush()
        self.stream.run_all()
        for request in self.named.values():
            request.state, request.epoch = State.ENDED, request.epoch + 1
        self.begin()
        self.free_pages.fill(self.shape.num_pages)
        self.rows.fill()
        self.padding_slot = -1
        if self.tracker.is_on:
            self.tracker.restart()

    def submit(self, request: Request) -> None:
        """It waits for its turn."""
        self.named[request.name] = request
        self.waiting.append(request)

    def put_copy(self, run: Callable[[], object]) -> int:
        """Something on the stream, behind all that was told."""
        self.events.flush()
        return self.stream.put(run)

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Within the pool, on the stream."""

        def copy() -> None:
            self.judge.spread(self.name, sources, self.name, targets)
            self.content.copy(numbers(sources), numbers(targets))

        self.put_copy(copy)
