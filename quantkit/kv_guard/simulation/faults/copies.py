"""Copies that bring something else: kind 14, and what only a checksum sees."""

from collections.abc import Iterator

from torch import Tensor

from quantkit.kv_guard.simulation.content import NUM_LAYERS, Content
from quantkit.kv_guard.simulation.events import numbers
from quantkit.kv_guard.simulation.faults.scripts import awaited, claim, fire, is_quiet, settled
from quantkit.kv_guard.simulation.host_tier import Copy
from quantkit.kv_guard.simulation.judge import Injection
from quantkit.kv_guard.simulation.requests import State
from quantkit.kv_guard.simulation.stream import Lane
from quantkit.kv_guard.simulation.tree import Node
from quantkit.kv_guard.simulation.world import World


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
    count = min(len(copy.pages), len(other.pages or []))
    fire(world, injection, copy.pages[:count], [])
    injection.pages |= {(host.name, page) for page in copy.host_pages[:count]}
    host.replace(copy.host_pages[:count], other)
    yield from _until_done(copy.lane)
    yield from settled(injection)


def _push_out(world: World) -> None:
    """What the host's memory has falls out of the pool, so that it is loaded."""
    engine = world.decode
    for node in engine.tree.evictable():
        if node.host_pages is not None and _is_quiet_node(world, node):
            engine.free_pages.put(engine.tree.evict(node))


def _is_quiet_node(world: World, node: Node) -> bool:
    return world.judge.is_free([(world.decode.name, page) for page in node.pages or []])


def _is_other(world: World, node: Node, copy: Copy) -> bool:
    is_known = node.held is not None or not world.decode.events.is_on
    return node.pages is not None and not node.is_busy and is_known and node.keys[0] != copy.node.keys[0]


def torn(world: World, injection: Injection) -> Iterator[None]:
    """Kind 13: a copy is said to be complete before half of a layer has come."""
    half = world.decode.shape.page_size // 2

    def tear(content: Content, pages: Tensor) -> None:
        content.words_LPS[NUM_LAYERS - 1, pages, half:] = ~content.words_LPS[NUM_LAYERS - 1, pages, half:]

    yield from _damage(world, injection, tear)


def bit_flip(world: World, injection: Injection) -> Iterator[None]:
    """A bit turns over on the way."""
    bit = world.random.getrandbits(20)
    yield from _damage(world, injection, lambda content, pages: content.flip(int(pages[0]), bit))


def _damage(world: World, injection: Injection, harm) -> Iterator[None]:  # type: ignore[no-untyped-def]
    """What a lane has brought is changed before anybody is told that it is complete."""
    engine, host = world.decode, world.decode.host
    of_transfer = host is None or world.random.random() < 0.4

    def find() -> tuple[Lane, str, Content, list[int], list[str]] | None:
        for copy in [] if of_transfer or host is None else host.copies:
            if copy.lane is not None and copy.lane.parts and _is_quiet_copy(world, copy):
                name, content = (engine.name, engine.content) if copy.is_load else (host.name, host.content)
                return copy.lane, name, content, copy.pages if copy.is_load else copy.host_pages, []
        for transfer in world.link.transfers if of_transfer and world.link else []:
            for lane in transfer.lanes:
                is_once = sum(lane.pages == other.pages for other in transfer.lanes) == 1
                is_able = transfer.request.state is State.ARRIVING and is_quiet(world, transfer.request)
                if lane.parts and lane.pages and is_once and is_able:
                    return lane, engine.name, engine.content, lane.pages, [transfer.request.name]
        return None

    found = yield from awaited(find)
    if found is None:
        return
    lane, name, content, pages, requests = found
    claim(world, injection, pages if name == engine.name else [], requests)

    def strike() -> None:
        injection.pages |= {(name, page) for page in pages}
        fire(world, injection, [], requests)
        harm(content, numbers(pages))

    lane.parts.append(strike)
    yield from _until_done(lane)
    yield from settled(injection)


def _is_quiet_copy(world: World, copy: Copy) -> bool:
    return world.judge.is_free([(world.decode.name, page) for page in copy.pages])


def _until_done(lane: Lane | None) -> Iterator[None]:
    for _ in range(30):
        if lane is None or lane.is_done:
            return
        yield
