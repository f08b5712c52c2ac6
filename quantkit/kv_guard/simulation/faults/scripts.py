"""What the scripts of faults have in common.

A script goes on once a tick, before the engines do anything: it waits for an opportunity, does what an engine must not
do, and lets some time pass. A step in flight has then been launched and has not begun on the device.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from quantkit.kv_guard.simulation.allocator import NULL_PAGE
from quantkit.kv_guard.simulation.engine import Engine
from quantkit.kv_guard.simulation.judge import Injection
from quantkit.kv_guard.simulation.memory import own_pages
from quantkit.kv_guard.simulation.requests import Request, State
from quantkit.kv_guard.simulation.steps import Launched, Part
from quantkit.kv_guard.simulation.stream import Lane, Op
from quantkit.kv_guard.simulation.tree import Node
from quantkit.kv_guard.simulation.world import World

Script = Callable[[World, Injection], Iterator[None]]
Found = TypeVar("Found")

_PATIENCE = 30  # ticks in which an opportunity may come
_SETTLING = 6  # ticks in which what was read is judged
_AFTERMATH = 2  # and those in which what was seen may still harm another


def awaited(find: Callable[[], Found | None]) -> Generator[None, None, Found | None]:
    """Ticks until there is something; the value of the expression is what was found, None if nothing was."""
    for _ in range(_PATIENCE):
        found = find()
        if found is not None:
            return found
        yield
    return None


def settled(injection: Injection) -> Iterator[None]:
    """Time passes, and the consequences with it."""
    for _ in range(_SETTLING):
        if injection.seen:
            break
        yield
    for _ in range(_AFTERMATH):
        yield


NOBODY = ("", -1)  # a life: of no request in particular


def claim(world: World, injection: Injection, pages: list[int], requests: list[Request]) -> None:
    """No other fault takes these pages of the decode pool, what is being copied from there, and these requests."""
    injection.pages |= {(world.decode.name, page) for page in pages}
    host = world.decode.host
    for copy in host.copies if host else []:
        pairs = [] if copy.is_load else zip(copy.pages, copy.host_pages, strict=True)
        injection.pages |= {(host.name, target) for page, target in pairs if host and page in pages}
    injection.requests |= {request.name for request in requests}
    injection.lives |= {(request.name, request.epoch) for request in requests}


def fire(world: World, injection: Injection, pages: list[int], requests: list[Request]) -> None:
    """From now on what is said of them is due to the fault, which the device does at once."""
    claim(world, injection, pages, requests)
    injection.is_fired = True


def fire_behind(world: World, injection: Injection, pages: list[int], requests: list[Request]) -> None:
    """Likewise, of what the device does behind all that it was told."""
    world.decode.events.flush()
    injection.since = world.decode.stream.num_put
    fire(world, injection, pages, requests)


def strike(world: World, at: int, op: Op) -> None:
    """Do something beside the stream as soon as an operation of it has run."""
    stream = world.decode.stream
    world.beside.add(Lane(deque([op]), may_begin=lambda: False, must_run=lambda: stream.num_run >= at))


def in_flight(engine: Engine) -> Launched | None:
    """A step that was launched and has not begun."""
    launched = engine.launched[-1] if engine.launched else None
    return launched if launched and engine.stream.num_run < launched.begun else None


def parts_in_flight(world: World) -> list[tuple[Launched, Part]]:
    """Of requests that nobody ended meanwhile, and no other fault concerns, in any order."""
    launched = in_flight(world.decode)
    if launched is None:
        return []
    parts = [part for part in launched.parts if part.request.epoch == part.epoch and is_quiet(world, part.request)]
    world.random.shuffle(parts)
    return [(launched, part) for part in parts]


def is_quiet(world: World, request: Request, of: Injection | None = None) -> bool:
    """No fault but one concerns it or its pages."""
    return world.judge.is_free([(world.decode.name, page) for page in request.pages], [request.name], of)


def running(world: World, *states: State, of: Injection | None = None) -> list[Request]:
    """Requests of the engine that serves, that no other fault than one concerns, in any order."""
    wanted = states or (State.PREFILL, State.DECODE)
    found = [one for one in world.decode.running if one.state in wanted and is_quiet(world, one, of)]
    world.random.shuffle(found)
    return found


def is_askable(world: World, node: Node) -> bool:
    """There is room for what `asked_again` makes, and no other fault concerns it."""
    is_short = node.end * world.decode.shape.page_size + 9 <= world.decode.shape.most_tokens
    return is_short and world.judge.is_free([(world.decode.name, page) for page in node.pages or []])


def asked_again(world: World, node: Node) -> Request:
    """A request whose prompt is what a node of the cache has, and a token; it is the next."""
    tokens = [token for one in node.path() for key in one.keys for token in key]
    request = world.traffic.made([*tokens, 1], 8)
    world.decode.submit(request)
    world.decode.waiting.rotate(1)
    return request


def foreign_page(world: World, request: Request) -> int | None:
    """An intact page of another request's own."""
    for other in running(world):
        pages = [page for page in own_pages(other) if page not in request.pages]
        if other is not request and pages:
            return world.random.choice(pages)
    return None


def seen_pages(world: World, part: Part) -> range:
    """Logical pages that a part reads and that are there."""
    num_pages = -(-(part.start + part.num_right) // world.decode.shape.page_size)
    return range(part.first, min(num_pages, len(part.request.pages)))


def row_pages(request: Request) -> list[int]:
    """All that it reads."""
    return [page for page in request.pages if page != NULL_PAGE]
