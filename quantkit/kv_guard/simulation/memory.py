"""Pages for requests: taken, shared through the cache, given up, and taken away from others where there are none."""

from quantkit.kv_guard.simulation.allocator import NULL_PAGE
from quantkit.kv_guard.simulation.engine import Engine
from quantkit.kv_guard.simulation.requests import Request, State
from quantkit.kv_guard.simulation.tree import Node


def num_pages_of(engine: Engine, num_tokens: int) -> int:
    return -(-num_tokens // engine.shape.page_size)


def obtain(engine: Engine, count: int, keep: Request | None) -> list[int] | None:
    """Free pages, if need be from the cache or from the request that came last, which begins again, but ``keep``."""
    while len(engine.free_pages.free) < count:
        idle = engine.tree.evictable()
        if idle:
            for node in idle:
                engine.free_pages.put(engine.tree.evict(node))
                if len(engine.free_pages.free) >= count:
                    break
            continue
        victims = [one for one in engine.running if one is not keep and one.state in (State.PREFILL, State.DECODE)]
        if not victims:
            return None
        retract(engine, victims[-1])
    return engine.free_pages.take(count)


def grow(engine: Engine, request: Request, num_pages: int) -> bool:
    """So many pages for a request; False where there are none to be had."""
    first = len(request.pages)
    if num_pages <= first:
        return True
    pages = obtain(engine, num_pages - first, request)
    if pages is None:
        return False
    give(engine, request, pages)
    return True


def give(engine: Engine, request: Request, pages: list[int]) -> None:
    """Pages that were taken become a request's next ones."""
    first = len(request.pages)
    if engine.events.is_on:
        page_size = engine.shape.page_size
        owners = [request.owner(engine.tracker.chains, page_size, index) for index in range(first, first + len(pages))]
        engine.events.grant(pages, request.row, first, owners)
    engine.rows.write(request.row, first, pages)
    request.pages += pages


def own_pages(request: Request, first: int = 0) -> list[int]:
    """Those that the cache does not hold, from logical page ``first`` on."""
    return [page for page in request.pages[max(first, request.num_shared) :] if page != NULL_PAGE]


def cache_computed(engine: Engine, request: Request, num_tokens: int) -> None:
    """Whole pages of the first tokens go to the cache; where it has its own, the row reads those from now on."""
    whole = num_tokens // engine.shape.page_size
    if whole <= request.num_shared or request.num_pruned:
        return
    tree = engine.tree
    inserted = tree.insert(request.page_keys(engine.shape.page_size, whole), request.pages[:whole])
    for node in inserted.fresh:
        engine.events.cache(node, request.row)
    for node in inserted.replaced:
        own = request.pages[node.first : node.end]
        request.pages[node.first : node.end] = node.pages or []
        engine.events.share(node, request.row)
        engine.rows.write(request.row, node.first, node.pages or [])
        engine.free_pages.put(own)
    hold(engine, request, inserted.node)


def hold(engine: Engine, request: Request, node: Node) -> None:
    """The cache's part of a request's pages ends with a node, which stays."""
    engine.tree.lock(node)
    if request.node is not None:
        engine.tree.unlock(request.node)
    request.node, request.num_shared = node, node.end


def let_go(engine: Engine, request: Request) -> None:
    """Its row and its part of the cache; its own pages are released on their own."""
    if request.node is not None:
        engine.tree.unlock(request.node)
    if request.row:
        engine.events.close(request.row)
        engine.rows.free.append(request.row)
    request.node, request.row, request.num_shared, request.num_pruned = None, 0, 0, 0
    request.pages, request.epoch, request.in_flight = [], request.epoch + 1, 0
    for queue in (engine.running, engine.arriving, engine.sending):
        if request in queue:
            queue.remove(request)


def retract(engine: Engine, request: Request) -> None:
    """It gives everything up and waits again, with what it knows by now."""
    pages = own_pages(request)
    let_go(engine, request)
    engine.free_pages.put(pages)
    request.state, request.computed, request.launched = State.WAITING, 0, 0
    request.device_known = request.known
    engine.waiting.appendleft(request)


def finish(engine: Engine, request: Request) -> None:
    """It has all its tokens: the cache keeps what is whole."""
    cache_computed(engine, request, request.computed)
    pages = own_pages(request)
    let_go(engine, request)
    engine.free_pages.put(pages)
    end(engine, request)


def abort(engine: Engine, request: Request) -> None:
    """It ends here, and nothing of it is kept that was not cached before. Pages that are on their way come later."""
    pages = [] if request.state is State.ARRIVING else own_pages(request)
    let_go(engine, request)
    engine.free_pages.put(pages)
    end(engine, request)


def end(engine: Engine, request: Request) -> None:
    """Nobody knows it any more."""
    request.state = State.ENDED
    engine.named.pop(request.name, None)
    if request in engine.waiting:
        engine.waiting.remove(request)
