"""Pages that several read, and one gives up for all: kinds 7, 8 and 9."""

from collections.abc import Iterator

from quantkit.kv_guard.simulation.admission import start
from quantkit.kv_guard.simulation.faults.scripts import (
    asked_again,
    awaited,
    fire_behind,
    is_askable,
    row_pages,
    running,
    settled,
)
from quantkit.kv_guard.simulation.judge import Injection
from quantkit.kv_guard.simulation.memory import abort, give, let_go, own_pages
from quantkit.kv_guard.simulation.requests import Request, State
from quantkit.kv_guard.simulation.tree import Node
from quantkit.kv_guard.simulation.world import World


def stolen_prefix(world: World, injection: Injection) -> Iterator[None]:
    """Kind 7: between the look-up of a prefix and its lock, the cache gives it up."""
    engine = world.decode

    def find() -> Node | None:
        idle = [node for node in engine.tree.evictable() if node.host_pages is None and is_askable(world, node)]
        return world.random.choice(idle) if idle and engine.rows.free else None

    node = yield from awaited(find)
    if node is None:
        return
    request = asked_again(world, node)
    pages = list(node.pages or [])
    above = node.parent
    assert above is not None, "it is no root"
    fire_behind(world, injection, pages, [request])
    engine.free_pages.put(engine.tree.evict(node))
    start(engine, request, above)
    engine.events.share(node, request.row)
    engine.rows.write(request.row, node.first, pages)
    request.pages += pages
    request.num_shared = node.end
    request.computed = request.launched = node.end * engine.shape.page_size
    engine.free_pages.prefer(pages)
    yield from settled(injection)


def freed_by_retraction(world: World, injection: Injection) -> Iterator[None]:
    """Kind 8: a chunked prefill is retracted, and frees pages with the rest that it has given to the cache."""
    engine = world.decode

    def find() -> Request | None:
        able = (one for one in running(world, State.PREFILL) if one.num_shared and one.launched < one.known)
        return next(able, None)

    request = yield from awaited(find)
    if request is None:
        return
    pages = row_pages(request)
    shared = request.pages[: request.num_shared]
    let_go(engine, request)
    fire_behind(world, injection, shared, [request])
    engine.free_pages.put(pages)
    engine.free_pages.prefer(pages)
    request.state, request.computed, request.launched = State.WAITING, 0, 0
    request.device_known = request.known
    engine.waiting.appendleft(request)
    yield from settled(injection)


def cancelled_under_a_prefix(world: World, injection: Injection) -> Iterator[None]:
    """Kind 9: one of two that share a prefix, which speculates, is cancelled and tried again: too much is undone."""
    engine = world.decode

    def find() -> tuple[Request, Node, Request] | None:
        able = running(world, State.DECODE)
        for request in able:
            node = request.node
            if node is None or node.parent is None or not request.drafts or not _is_quiet_node(world, node):
                continue
            others = [one for one in running(world, State.DECODE) if one.node is node and one is not request]
            is_last = all(child.pages is None for child in node.children.values())
            if len(others) == 1 and node.readers == 2 and is_last and not node.is_busy:
                return request, node, others[0]
        shared = [one.node for one in able if one.drafts and one.node and one.node.readers == 1]
        shared = [node for node in shared if is_askable(world, node)]
        if shared and all(one.state is State.DECODE for one in engine.running):
            asked_again(world, shared[0])
        return None

    found = yield from awaited(find)
    if found is None:
        return
    request, node, other = found
    pages = [page for one in node.path() for page in one.pages or []]
    again = world.traffic.made(request.tokens[: request.num_prompt], request.total - request.num_prompt)
    if world.random.random() < 0.5:
        fire_behind(world, injection, pages, [other])
        abort(engine, request)
        engine.tree.unlock(node)  # a second time, and of all above it
        pages = engine.tree.evict(node)
        engine.tree.lock(node)  # or its next pages, which no fault is said to concern, would have a reader too few
        engine.free_pages.put(pages)
    else:
        pages = pages[-1:]
        fire_behind(world, injection, pages, [other])
        abort(engine, request)
        engine.free_pages.put(pages)  # the roll-back begins a page too early
    engine.free_pages.prefer(pages)
    engine.submit(again)
    _take_at_once(world, pages)
    yield from settled(injection)


def _take_at_once(world: World, pages: list[int]) -> None:
    """Somebody else needs pages just now."""
    engine = world.decode
    other = next((one for one in running(world, State.DECODE) if own_pages(one)), None)
    taken = engine.free_pages.take(min(len(pages), 2)) if other is not None else None
    if other is None or taken is None:
        return
    if len(other.pages) + len(taken) > engine.shape.most_pages:
        engine.free_pages.put(taken)
    else:
        give(engine, other, taken)


def _is_quiet_node(world: World, node: Node) -> bool:
    return world.judge.is_free([(world.decode.name, page) for page in node.pages or []])
