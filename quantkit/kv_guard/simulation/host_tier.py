"""The host's memory behind a pool: nodes of the cache are copied there, fall out of the pool, and come back."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from quantkit.kv_guard.simulation.allocator import FreePages
from quantkit.kv_guard.simulation.content import NUM_LAYERS, Content
from quantkit.kv_guard.simulation.engine import Engine, watched
from quantkit.kv_guard.simulation.events import numbers
from quantkit.kv_guard.simulation.stream import Lane, Op
from quantkit.kv_guard.simulation.tree import Node
from quantkit.kv_guard.simulation.watched import Known


@dataclass(slots=True, eq=False)
class Copy:
    """A node on its way to the host or back. ``pages`` are the pool's, ``host_pages`` the host's."""

    node: Node
    pages: list[int]
    host_pages: list[int]
    number: int
    is_load: bool
    may_begin: Callable[[], bool] = lambda: True
    held: list[Known] = field(default_factory=list)  # what is sent; on the device's time where it lies there
    lane: Lane | None = None


class HostTier:
    """Its tracker runs on the host, where nothing is put off; it has no steps, and settles after each copy."""

    def __init__(self, engine: Engine) -> None:
        shape, around = engine.shape, engine.around
        self._engine = engine
        self.name = f"{engine.name} host"
        self._num_pages = shape.host_pages
        self.content = Content(shape.host_pages, shape.page_size, around.random.getrandbits(31))
        first = around.random.getrandbits(61)
        self.tracker = watched(shape, shape.host_pages, first, around)
        self.free_pages = FreePages(shape.host_pages, self._release)
        self.copies: list[Copy] = []

    def offload(self, node: Node) -> bool:
        """Copy a node to the host; it stays in the pool, and unread ones may then fall out."""
        engine = self._engine
        engine.tree.lock(node)  # what comes before it must stay on the host, too
        host_pages = self._obtain(len(node.keys))
        if host_pages is None or node.pages is None:
            engine.tree.unlock(node)
            return False
        node.is_busy = True
        copy = Copy(node, list(node.pages), host_pages, next(engine.around.transfers), is_load=False)
        if self.tracker.is_on:
            self.tracker.reserve(numbers(host_pages), copy.number)
        engine.events.send(copy.pages, partial(_held_by, copy, node))
        behind = engine.put_copy(lambda: None)  # what fills the pages is done by then
        copy.may_begin = partial(_has_run, engine, behind)
        self._begin(copy)
        return True

    def load(self, node: Node) -> bool:
        """Copy a node back; False where the pool has no room."""
        engine = self._engine
        engine.tree.lock(node)
        pages = engine.free_pages.take(len(node.keys)) or self._take_idle(len(node.keys))
        engine.tree.unlock(node)
        if pages is None:
            return False
        node.is_busy = True
        engine.tree.lock(node)
        copy = Copy(node, pages, list(node.host_pages or []), next(engine.around.transfers), is_load=True)
        copy.held += [node.host_held] if node.host_held else []
        engine.events.reserve(pages, copy.number)
        behind = engine.put_copy(lambda: None)
        copy.may_begin = partial(_has_run, engine, behind)
        if self.tracker.is_on:
            self.tracker.send(numbers(copy.host_pages), copy.held[0])
        self._begin(copy)
        return True

    def poll(self) -> None:
        """What became of the copies."""
        for copy in [one for one in self.copies if one.lane is not None and one.lane.is_done]:
            self.copies.remove(copy)
            copy.node.is_busy = False
            self._engine.tree.unlock(copy.node)
            (self._loaded if copy.is_load else self._offloaded)(copy)

    def parts(self, copy: Copy) -> list[Op]:
        """The tags, each layer, and the tags again: no content of a copy that is late comes without one behind it."""
        tags = partial(self._copy_tags, copy)
        return [tags, *(partial(self._copy_layer, copy, layer) for layer in range(NUM_LAYERS)), tags]

    def restart(self) -> None:
        """Nothing is there."""
        self.copies.clear()
        self.free_pages.fill(self._num_pages)
        if self.tracker.is_on:
            self.settle()
            self.tracker.restart()

    def settle(self) -> bool:
        """Whether the guard has nothing to say."""
        if not self.tracker.is_on:
            return True
        verdict, wrongs = self.tracker.settle()
        self._engine.judge.see(self.name, verdict, wrongs)
        return not verdict.violations

    def replace(self, host_pages: list[int], other: Node) -> None:
        """The pages of one node are given to another, whatever they are needed for: a fault."""
        pages = numbers((other.pages or [])[: len(host_pages)])
        targets = numbers(host_pages[: len(pages)])
        held = other.held[: len(pages)] if other.held is not None else None
        if self.tracker.is_on and held:
            self.tracker.release(targets)
            number = next(self._engine.around.transfers)
            self.tracker.reserve(targets, number)
            sums = self._engine.content.checksums.of(pages) if self._engine.around.content else None
            self._engine.tracker.send(pages, held, sums)
            self.tracker.land(targets, number, self._engine.tracker.lift(pages, held))
        for layer in range(NUM_LAYERS):
            self.content.take(self._engine.content, layer, pages, targets)
        if self.tracker.is_on and held:
            is_right = self.content.holds(targets, other.words()[: len(targets) * self.content.page_size])
            self.tracker.store(targets, held, is_right, self._sums(targets))

    def _begin(self, copy: Copy) -> None:
        copy.lane = self._engine.around.beside.add(Lane(deque(self.parts(copy)), copy.may_begin))
        self.copies.append(copy)

    def _offloaded(self, copy: Copy) -> None:
        engine = self._engine
        engine.events.sent(copy.pages, lambda: copy.held[0])
        if self.tracker.is_on:
            targets = numbers(copy.host_pages)
            is_right = self.content.holds(targets, copy.node.words())
            copy.node.host_held = self.tracker.store(targets, copy.held[0], is_right, self._sums(targets))
        copy.node.host_pages = copy.host_pages
        if not self.settle() or not engine.tree.has(copy.node):
            self.free_pages.put(engine.tree.evict_on_host(copy.node))

    def _loaded(self, copy: Copy) -> None:
        engine = self._engine
        if self.tracker.is_on:
            self.tracker.sent(numbers(copy.host_pages), copy.held[0])
        is_good = self.settle()
        if is_good and engine.tree.has(copy.node):
            copy.node.pages = copy.pages
            engine.events.store(copy.node, copy.held[0] if copy.held else None)
        else:  # what came is not what was asked for, and is computed again
            engine.events.drained(copy.pages, copy.number)
            engine.free_pages.put(copy.pages)
            self.drop(copy.node)

    def drop(self, node: Node) -> None:
        """What only the host has, from a node on."""
        below = [node]
        for one in below:
            below += one.children.values()
            if one.host_pages is not None and not one.is_busy:  # or its own copy sees to it
                self.free_pages.put(one.host_pages)
                one.host_pages = one.host_held = None
        self._engine.tree.remove(node)

    def _copy_tags(self, copy: Copy) -> None:
        judge, name = self._engine.judge, self._engine.name
        if copy.is_load:
            judge.spread(self.name, copy.host_pages, name, copy.pages)
        else:
            judge.spread(name, copy.pages, self.name, copy.host_pages)
        if not self.tracker.is_on:
            return
        pages, host_pages = numbers(copy.pages), numbers(copy.host_pages)
        sent = copy.held[0] if copy.held else None
        if copy.is_load:
            self._engine.tracker.land(pages, copy.number, self.tracker.lift(host_pages, sent))
        else:
            self.tracker.land(host_pages, copy.number, self._engine.tracker.lift(pages, sent))

    def _copy_layer(self, copy: Copy, layer: int) -> None:
        engine, pages, host_pages = self._engine, numbers(copy.pages), numbers(copy.host_pages)
        if copy.is_load:
            engine.content.take(self.content, layer, host_pages, pages)
            engine.tracker.land_content(pages, copy.number, self.tracker, host_pages)
        else:
            self.content.take(engine.content, layer, pages, host_pages)
            self.tracker.land_content(host_pages, copy.number, engine.tracker, pages)

    def _obtain(self, count: int) -> list[int] | None:
        while len(self.free_pages.free) < count:
            idle = self._engine.tree.evictable_on_host()
            if not idle:
                return None
            self.free_pages.put(self._engine.tree.evict_on_host(idle[0]))
        return self.free_pages.take(count)

    def _take_idle(self, count: int) -> list[int] | None:
        engine = self._engine
        while len(engine.free_pages.free) < count:
            idle = engine.tree.evictable()
            if not idle:
                return None
            engine.free_pages.put(engine.tree.evict(idle[0]))
        return engine.free_pages.take(count)

    def _sums(self, pages: Tensor) -> Tensor | None:
        return self.content.checksums.of(pages) if self._engine.around.content else None

    def _release(self, pages: object) -> None:
        if self.tracker.is_on:
            self.tracker.release(numbers(pages))  # type: ignore[arg-type]


def _held_by(copy: Copy, node: Node) -> Known:
    """When the stream gets there: what the node holds by then, which is kept beside the copy."""
    assert node.held is not None, "the node was never cached"
    copy.held.append(node.held)
    return node.held


def _has_run(engine: Engine, number: int) -> bool:
    return engine.stream.num_run >= number
