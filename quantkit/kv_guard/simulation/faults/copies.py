"""Copies that bring something else: kind 14, and what only a checksum sees."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from quantkit.kv_guard.simulation.content import NUM_LAYERS, Content
from quantkit.kv_guard.simulation.events import numbers
from quantkit.kv_guard.simulation.faults.scripts import (
    NOBODY,
    asked_again,
    awaited,
    claim,
    fire,
    is_askable,
    is_quiet,
    settled,
)
from quantkit.kv_guard.simulation.host_tier import Copy, HostTier
from quantkit.kv_guard.simulation.judge import Injection
from quantkit.kv_guard.simulation.requests import Request, State
from quantkit.kv_guard.simulation.stream import Lane
from quantkit.kv_guard.simulation.tree import Node
from quantkit.kv_guard.simulation.watched import Watched
from quantkit.kv_guard.simulation.world import World, can_be_offloaded


@dataclass(frozen=True, slots=True)
class Target:
    """What a lane brings to pages of a pool, and who waits for it."""

    lane: Lane
    pool: str
    content: Content
    tracker: Watched
    pages: list[int]
    requests: list[Request]


def host_page_reused(world: World, injection: Injection) -> Iterator[None]:
    """Kind 14: a node comes back from the host's memory, whose pages there are given to another meanwhile."""
    engine, host = world.decode, world.decode.host
    assert host is not None, "there is no host's memory"

    def find() -> tuple[Copy, Node] | None:
        _push_out(world)
        for copy in host.copies:
            is_under_way = copy.is_load and copy.lane is not None and len(copy.lane.parts) >= NUM_LAYERS
            others = [node for node in engine.tree.nodes() if _is_other(world, node, copy)] if is_under_way else []
            if others and _is_quiet_copy(world, copy):
                return copy, world.random.choice(others)
        return None

    found = yield from awaited(find)
    if found is None:
        return
    copy, other = found
    claim(world, injection, copy.pages, [])
    injection.lives.add(NOBODY)
    count = min(len(copy.pages), len(other.pages or []))
    fire(world, injection, copy.pages[:count], [])
    injection.pages |= {(host.name, page) for page in copy.host_pages[:count]}
    host.replace(copy.host_pages[:count], other)
    yield from _until_done(copy.lane)
    yield from settled(injection)


def _push_out(world: World) -> None:
    """What the host's memory has falls out of the pool, and somebody asks for it."""
    engine, host = world.decode, world.decode.host
    for node in engine.tree.evictable():
        if node.host_pages is not None and is_askable(world, node):
            engine.free_pages.put(engine.tree.evict(node))
    if host is not None and not host.copies:
        able = [node for node in engine.tree.nodes() if can_be_offloaded(node) and is_askable(world, node)]
        for node in able[:2]:
            host.offload(node)
    away = [node for node in engine.tree.nodes() if node.pages is None and not node.is_busy and is_askable(world, node)]
    if host is not None and away and not any(copy.is_load for copy in host.copies):
        asked_again(world, world.random.choice(away))


def _is_other(world: World, node: Node, copy: Copy) -> bool:
    # what is held is known on the device's time, and a split may be on its way there
    is_known = not world.decode.events.is_on or (node.held is not None and len(node.held.indices) == len(node.keys))
    return node.pages is not None and not node.is_busy and is_known and node.keys[0] != copy.node.keys[0]


def torn(world: World, injection: Injection) -> Iterator[None]:
    """Kind 13: a copy is said to be complete before half of a layer has come."""
    half = world.decode.shape.page_size // 2

    def tear(content: Content, pages: Tensor) -> Tensor:
        content.words_LPS[NUM_LAYERS - 1, pages, half:] = ~content.words_LPS[NUM_LAYERS - 1, pages, half:]
        return pages

    yield from _damage(world, injection, tear)


def bit_flip(world: World, injection: Injection) -> Iterator[None]:
    """A bit turns over on the way."""
    bit = world.random.getrandbits(20)

    def turn(content: Content, pages: Tensor) -> Tensor:
        content.flip(int(pages[0]), bit)
        return pages[:1]

    yield from _damage(world, injection, turn)


def _damage(world: World, injection: Injection, harm: Callable[[Content, Tensor], Tensor]) -> Iterator[None]:
    """What a lane has brought is changed before anybody is told that it is complete."""
    engine, host = world.decode, world.decode.host
    of_transfer = host is None or world.random.random() < 0.4

    def find() -> Target | None:
        return _transfer_under_way(world) if host is None or of_transfer else _copy_under_way(world, host)

    target = yield from awaited(find)
    if target is None:
        return
    claim(world, injection, target.pages if target.pool == engine.name else [], target.requests)
    injection.lives |= set() if target.requests else {NOBODY}

    def strike() -> None:
        injection.pages |= {(target.pool, page) for page in target.pages}
        fire(world, injection, [], target.requests)
        harmed = harm(target.content, numbers(target.pages))
        target.tracker.books.doubt(harmed)

    target.lane.parts.append(strike)
    yield from _until_done(target.lane)
    yield from settled(injection)


def _copy_under_way(world: World, host: HostTier) -> Target | None:
    engine = world.decode
    for copy in host.copies:
        if copy.lane is not None and copy.lane.parts and _is_quiet_copy(world, copy):
            if copy.is_load:
                return Target(copy.lane, engine.name, engine.content, engine.tracker, copy.pages, [])
            return Target(copy.lane, host.name, host.content, host.tracker, copy.host_pages, [])
    return None


def _transfer_under_way(world: World) -> Target | None:
    """Pages that are sent once alone: what comes twice is repaired."""
    engine = world.decode
    for transfer in world.link.transfers if world.link else []:
        is_able = transfer.request.state is State.ARRIVING and is_quiet(world, transfer.request)
        for lane in transfer.lanes if is_able else []:
            is_once = sum(lane.pages == other.pages for other in transfer.lanes) == 1
            if lane.parts and lane.pages and is_once:
                return Target(lane, engine.name, engine.content, engine.tracker, lane.pages, [transfer.request])
    return None


def _is_quiet_copy(world: World, copy: Copy) -> bool:
    return world.judge.is_free([(world.decode.name, page) for page in copy.pages])


def _until_done(lane: Lane | None) -> Iterator[None]:
    for _ in range(30):
        if lane is None or lane.is_done:
            return
        yield
