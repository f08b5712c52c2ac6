"""Requests get rows: a prefix that the cache has is shared, loaded from the host's memory, or computed."""

from quantkit.kv_guard.simulation.engine import Engine
from quantkit.kv_guard.simulation.memory import give, hold, num_pages_of, obtain
from quantkit.kv_guard.simulation.requests import Request, State
from quantkit.kv_guard.simulation.tree import Node


def admit(engine: Engine) -> None:
    """As many as there is room for, in their order."""
    for request, node in list(engine.loading):
        _start_if_loaded(engine, request, node)
    while engine.waiting and engine.rows.free:
        request = engine.waiting[0]
        node = find_prefix(engine, request)
        if _is_loaded_first(engine, request, node):
            continue
        if not start(engine, request, _with_pages(node)):
            break


def find_prefix(engine: Engine, request: Request) -> Node:
    """What the cache has of a request's whole pages; one token at least is computed, which gives the next."""
    most = (request.known - 1) // engine.shape.page_size
    return engine.tree.match(request.page_keys(engine.shape.page_size, most))


def start(engine: Engine, request: Request, node: Node) -> bool:
    """It gets a row that begins with the cache's pages; one that another engine prefills gets all pages at once."""
    engine.tree.lock(node)
    own: list[int] | None = []
    if request.source is not None:
        own = obtain(engine, num_pages_of(engine, request.num_prompt) - node.end, request)
    engine.tree.unlock(node)
    if own is None:
        return False
    if request in engine.waiting:
        engine.waiting.remove(request)
    request.row = engine.rows.free.pop()
    engine.events.open(request.row, request.name)
    for one in node.path():
        engine.events.share(one, request.row)
        request.pages += one.pages or []
    engine.rows.write(request.row, 0, request.pages)
    hold(engine, request, node)
    request.computed = request.launched = node.end * engine.shape.page_size
    if request.source is None:
        request.state = State.PREFILL
        engine.running.append(request)
    else:
        request.state = State.ARRIVING
        give(engine, request, own)
        engine.arriving.append(request)
    return True


def _with_pages(node: Node) -> Node:
    """The deepest that is in the pool, and all above it."""
    while node.parent is not None and any(one.pages is None for one in node.path()):
        node = node.parent
    return node


def _is_loaded_first(engine: Engine, request: Request, node: Node) -> bool:
    """What only the host's memory has begins to come back, and the request waits for it."""
    away = [one for one in node.path() if one.pages is None]
    if not away or engine.host is None:
        return False
    engine.tree.lock(node)
    if not all(one.is_busy or engine.host.load(one) for one in away):
        engine.tree.unlock(node)
        return False
    engine.waiting.remove(request)
    request.state = State.LOADING
    engine.loading.append((request, node))
    return True


def _start_if_loaded(engine: Engine, request: Request, node: Node) -> None:
    if request.state is State.LOADING and any(one.pages is None and one.is_busy for one in node.path()):
        return
    engine.loading.remove((request, node))
    engine.tree.unlock(node)
    if request.state is State.LOADING:  # or it was cancelled meanwhile; where a copy failed, its pages are computed
        request.state = State.WAITING
        engine.waiting.appendleft(request)
