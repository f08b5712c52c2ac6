"""Rows that go on from another: what they share is written no more, and what they copy must be there."""

from collections.abc import Iterator

from quantkit.kv_guard.simulation.allocator import NULL_PAGE
from quantkit.kv_guard.simulation.faults.scripts import awaited, fire_behind, running, settled
from quantkit.kv_guard.simulation.judge import Injection
from quantkit.kv_guard.simulation.requests import Request, State
from quantkit.kv_guard.simulation.results import begin_fork
from quantkit.kv_guard.simulation.world import World


def wrong_fork(world: World, injection: Injection) -> Iterator[None]:
    """A fork writes on in its parent's last page, or copies it when its parent has given it up."""
    engine = world.decode

    def find() -> Request | None:
        for request in running(world, State.DECODE):
            whole, rest = divmod(request.num_prompt, engine.shape.page_size)
            is_able = request.num_shared == whole and rest and request.pages[whole] != NULL_PAGE
            if is_able and not request.num_pruned and engine.rows.free and request.total - request.known > 4:
                return request
        return None

    parent = yield from awaited(find)
    if parent is None:
        return
    child = world.traffic.forked(parent)
    whole = parent.num_shared
    last = parent.pages[whole]
    if world.random.random() < 0.5:
        fire_behind(world, injection, [last], [parent, child])
        begin_fork(engine, parent, child, [], whole + 1)
    else:
        pages = engine.free_pages.take(1)
        if pages is None:
            return
        fire_behind(world, injection, [last, *pages], [parent, child])
        engine.free_pages.put([last])
        begin_fork(engine, parent, child, pages, whole)
    yield from settled(injection)
