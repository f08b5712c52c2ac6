"""Pages that are given away while somebody still writes or reads them: kinds 1, 2, 3 and 6."""

from collections import deque
from collections.abc import Iterator
from functools import partial

from quantkit.kv_guard.simulation.admission import find_prefix, start
from quantkit.kv_guard.simulation.allocator import NULL_PAGE
from quantkit.kv_guard.simulation.faults.scripts import (
    awaited,
    claim,
    fire,
    fire_behind,
    in_flight,
    is_quiet,
    parts_in_flight,
    running,
    settled,
)
from quantkit.kv_guard.simulation.judge import Injection
from quantkit.kv_guard.simulation.memory import abort, end, let_go, num_pages_of, own_pages
from quantkit.kv_guard.simulation.requests import Request, State
from quantkit.kv_guard.simulation.steps import Launched, Part
from quantkit.kv_guard.simulation.stream import Lane
from quantkit.kv_guard.simulation.transfers import Transfer
from quantkit.kv_guard.simulation.world import World


def late_transfer(world: World, injection: Injection) -> Iterator[None]:
    """Kind 1: a request is cancelled, its pages go to others, and then what was under way to them lands.

    The engine does not wait for it; or it was told, wrongly, that nothing is under way any more. Of what had begun to
    land before the release the rest comes at once: where a whole step lies between the content and the tag behind it,
    as with a gap of the link's, no tag can name it in time.
    """
    is_waited_for, link = world.random.random() < 0.5, world.link
    assert link is not None, "nothing is transferred"

    def find() -> tuple[Transfer, Lane] | None:
        for transfer in link.transfers:
            if not transfer.lanes and world.decode.stream.num_run >= transfer.granted:
                link.tell(transfer)
            whole = len(link.parts(transfer, [0]))
            lanes = [lane for lane in transfer.lanes if lane.pages and 1 < len(lane.parts) <= whole]
            if lanes and transfer.request.state is State.ARRIVING and is_quiet(world, transfer.request):
                return transfer, lanes[0]
        return None

    found = yield from awaited(find)
    if found is None:
        return
    transfer, lane = found
    injection.lanes = [lane]
    _forget_all_but(transfer, lane)
    for _ in range(world.random.choice((0, 0, 1, 2))):
        if len(lane.parts) > 2:
            lane.parts.popleft()()  # it has begun
            lane.at_once = not link.gap
    if is_waited_for:
        claim(world, injection, lane.pages, [])
        _release(world, transfer, is_drained=True)
        victim = yield from awaited(lambda: _holder_of_any(world, injection, lane.pages))
        if victim is None:
            lane.parts.clear()
            return
        _land_late(world, injection, lane, victim)
        yield from settled(injection)
    else:
        fire_behind(world, injection, transfer.pages, [])
        _release(world, transfer, is_drained=False)
        at = world.decode.stream.num_put + world.random.randint(0, 40)
        lane.must_run = lambda: world.decode.stream.num_run >= at
        yield from settled(injection)
        yield from settled(injection)


def _forget_all_but(transfer: Transfer, lane: Lane) -> None:
    """One part of a transfer is late, of the others nothing comes."""
    transfer.is_late = True
    for other in transfer.lanes:
        if other is not lane:
            other.parts.clear()
    lane.may_begin, lane.at_once = lambda: False, False


def _release(world: World, transfer: Transfer, *, is_drained: bool) -> None:
    """Who waited for a transfer is sent away, and its pages go to the next."""
    engine = world.decode
    let_go(engine, transfer.request)
    if is_drained:
        engine.events.drained(transfer.pages, transfer.number)
    engine.free_pages.put(transfer.pages)
    engine.free_pages.prefer(transfer.pages)
    end(engine, transfer.request)


def _holder_of_any(world: World, injection: Injection, pages: list[int]) -> Request | None:
    """Who has computed one of them, and goes on reading it."""
    world.decode.free_pages.prefer(pages)
    for request in running(world, of=injection):
        written = request.pages[request.num_pruned : num_pages_of(world.decode, request.computed)]
        if request.total - request.known > 4 and not set(written).isdisjoint(pages):
            return request
    return None


def _land_late(world: World, injection: Injection, lane: Lane, victim: Request) -> None:
    stream, epoch = world.decode.stream, victim.epoch
    world.decode.events.flush()
    at = stream.num_put + world.random.randint(0, 8)  # when the device has granted what the host has
    parts = list(lane.parts)

    def begin() -> None:
        if victim.epoch == epoch:
            fire(world, injection, lane.pages, [victim])
        else:
            lane.parts.clear()

    lane.parts = deque([begin, *parts])
    lane.must_run = lambda: stream.num_run >= at


def stale_write(world: World, injection: Injection) -> Iterator[None]:
    """Kind 2: a request has ended, the step in flight still writes for it, and its page is filled by a transfer."""

    def find() -> tuple[Launched, Part, Request] | None:
        launched, arriving = in_flight(world.decode), _remote(world)
        if launched is None or arriving is None:
            return None
        for part in launched.parts:
            is_free = world.judge.is_free([(world.decode.name, part.tail)], [part.request.name])
            if part.request.state is State.ENDED and part.tail in world.decode.free_pages.free and is_free:
                return launched, part, arriving
        return None

    found = yield from awaited(find)
    if found is None:
        return
    launched, part, arriving = found
    if _transfer_at_once(world, injection, launched, part.tail, arriving):
        injection.requests.add(part.request.name)
        injection.lives.add((part.request.name, part.epoch))
        yield from settled(injection)


def early_prune(world: World, injection: Injection) -> Iterator[None]:
    """Kind 3: a page leaves the window while the step in flight reads it, or before the step that does."""
    if world.random.random() < 0.5:
        yield from _prune_in_flight(world, injection)
    else:
        yield from _prune_before(world, injection)


def _prune_in_flight(world: World, injection: Injection) -> Iterator[None]:
    def find() -> tuple[Launched, Request, int, Request] | None:
        arriving = _remote(world)
        for launched, part in parts_in_flight(world) if arriving else []:
            request, first = part.request, part.first
            if request.num_shared <= first < len(request.pages) - 1 and request.pages[first] != NULL_PAGE:
                assert arriving is not None, "one was found"
                return launched, request, first, arriving
        return None

    found = yield from awaited(find)
    if found is None:
        return
    launched, request, first, arriving = found
    page = _given_up(world, request, first)
    if _transfer_at_once(world, injection, launched, page, arriving):
        claim(world, injection, [], [request])
        yield from settled(injection)


def _prune_before(world: World, injection: Injection) -> Iterator[None]:
    engine = world.decode
    window, page_size = engine.shape.window, engine.shape.page_size
    assert window is not None, "there is no window"

    def find() -> tuple[Request, int] | None:
        for request in running(world, State.DECODE):
            first = max(0, request.known - window) // page_size
            is_own = max(request.num_shared, request.num_pruned) <= first < len(request.pages) - 1
            if is_own and request.total - request.known > 4:
                return request, first
        return None

    found = yield from awaited(find)
    if found is None:
        return
    request, first = found
    request.num_pruned = first + 1
    fire_behind(world, injection, [request.pages[first]], [request])
    _given_up(world, request, first)
    if engine.shape.null_pages:  # and says so, as it believes it
        engine.events.prune(request.row, first + 1)
        engine.rows.write(request.row, first, [NULL_PAGE])
    yield from settled(injection)


def _given_up(world: World, request: Request, index: int) -> int:
    """A page of a request is free, and its row still names it."""
    page = request.pages[index]
    request.pages[index] = NULL_PAGE
    world.decode.free_pages.put([page])
    world.decode.free_pages.prefer([page])
    return page


def _remote(world: World) -> Request | None:
    """One that was prefilled and waits for pages."""
    for request in world.decode.waiting:
        source = request.source
        if source is not None and source.state is State.SENDING and request.num_prompt > world.decode.shape.page_size:
            return request if world.decode.rows.free and is_quiet(world, request) else None
    return None


def _transfer_at_once(world: World, injection: Injection, launched: Launched, page: int, arriving: Request) -> bool:
    """The sender is told of a page that the stream has not released yet, and is quick: it lands during the step."""
    engine, link = world.decode, world.link
    assert link is not None, "nothing is transferred"
    engine.free_pages.prefer([page])
    if not start(engine, arriving, find_prefix(engine, arriving)) or page not in arriving.pages[arriving.num_shared :]:
        return False
    transfer = link.begin(arriving)
    claim(world, injection, transfer.pages, [arriving])
    link.prefill.stream.run_to(transfer.sent)
    link.tell(transfer)
    lands = launched.begun + world.random.randint(0, 2)
    for lane in transfer.lanes:
        lane.must_run = lambda: engine.stream.num_run >= lands
        injection.lanes.append(lane)
        if lane.parts:
            lane.parts.appendleft(partial(fire, world, injection, transfer.pages, [arriving]))
    return True


def double_free(world: World, injection: Injection) -> Iterator[None]:
    """Kind 6: a page is released twice, in one group or in two, and so stands in the free list twice."""
    engine = world.decode
    found = yield from awaited(lambda: next((one for one in running(world) if own_pages(one)), None))
    if found is None:
        return
    page = world.random.choice(own_pages(found))
    fire_behind(world, injection, [page], [])
    if world.random.random() < 0.5:
        engine.free_pages.begin_group()
        abort(engine, found)
        engine.free_pages.put([page])
        engine.free_pages.end_group()
    else:
        abort(engine, found)
        engine.free_pages.put([page])
    while page in engine.free_pages.free:
        engine.free_pages.free.remove(page)
    engine.free_pages.free.extendleft([page, page])
    yield from settled(injection)
