"""A world: an engine that serves, one that prefills for it, the host's memory, users who come and go."""

from random import Random

from quantkit.kv_guard.page_tags import new_tracker
from quantkit.kv_guard.simulation.admission import admit
from quantkit.kv_guard.simulation.allocator import NULL_PAGE
from quantkit.kv_guard.simulation.engine import Engine, MakeGuard, Surroundings
from quantkit.kv_guard.simulation.host_tier import HostTier
from quantkit.kv_guard.simulation.judge import Judge
from quantkit.kv_guard.simulation.memory import abort, retract
from quantkit.kv_guard.simulation.requests import Request, State, Traffic
from quantkit.kv_guard.simulation.results import process
from quantkit.kv_guard.simulation.shapes import WorldShape
from quantkit.kv_guard.simulation.steps import launch
from quantkit.kv_guard.simulation.stream import Beside
from quantkit.kv_guard.simulation.transfers import Link
from quantkit.kv_guard.simulation.tree import Node

_REMOTE = 0.35  # of the requests another engine prefills


class World:
    """Everything that happens in it follows from the shape and the seed."""

    def __init__(self, shape: WorldShape, seed: int, *, make_guard: MakeGuard = new_tracker) -> None:
        self.random = Random(seed)
        self.judge = Judge()
        around = Surroundings(
            random=self.random,
            beside=Beside(self.random),
            judge=self.judge,
            make_guard=make_guard,
            content=shape.content,
        )
        self.beside = around.beside
        self.traffic = Traffic(shape.decode, self.random)
        self.decode = Engine("decode", shape.decode, around, self.traffic)
        self.engines = [self.decode]
        self.link: Link | None = None
        if shape.prefill is not None:
            self.prefill = Engine("prefill", shape.prefill, around)
            self.engines.append(self.prefill)
            self.link = Link(self.prefill, self.decode, self.random)
        if shape.decode.host_pages:
            self.decode.host = HostTier(self.decode)
        self.num_ticks = 0

    @property
    def num_checks(self) -> int:
        """Of pages, before and after each step."""
        return sum(engine.num_checks for engine in self.engines)

    @property
    def num_steps(self) -> int:
        """Of all engines."""
        return sum(engine.num_steps for engine in self.engines)

    def submit(self, request: Request) -> None:
        """By one way or the other."""
        if self.link is not None and self.random.random() < _REMOTE:
            self.link.submit(request)
        else:
            self.decode.submit(request)

    def tick(self, *, is_open: bool = True) -> None:
        """Requests come (while it is open), some go, and each engine decides one step."""
        self.num_ticks += 1
        while is_open and len(self.decode.named) < self.decode.shape.num_rows * 5 // 4:
            self.submit(self.traffic.request())
        if self.link:
            self.link.poll()
        if self.decode.host:
            self.decode.host.poll()
        for engine in self.engines:
            self._disturb(engine)
            step(engine)
        self.beside.run_some(2)

    def drain(self) -> None:
        """All results are read."""
        for engine in self.engines:
            while engine.launched:
                process(engine)
            engine.events.flush()
            engine.stream.run_all()

    def restart(self) -> None:
        """Everybody is sent away; faults and what they left behind are gone."""
        self.drain()
        for engine in self.engines:
            if engine.tracker.is_on:
                self.judge.see(engine.name, *engine.tracker.settle())
        self.beside.drop()
        for engine in self.engines:
            engine.restart()
            if engine.host:
                engine.host.restart()
        if self.link:
            self.link.restart()

    def _disturb(self, engine: Engine) -> None:
        """Users cancel, pages are moved together, the cache is copied away, somebody must make room."""
        chance = self.random.random()
        if chance < 0.04 and engine.named:
            cancel(engine, self.random.choice(list(engine.named.values())))
        elif chance < 0.12:
            compact(engine, self.random)
        elif chance < 0.4 and engine.host:
            nodes = [node for node in engine.tree.nodes() if can_be_offloaded(node)]
            if nodes:
                engine.host.offload(self.random.choice(nodes))
        elif chance < 0.44:
            able = [one for one in engine.running if one.state in (State.PREFILL, State.DECODE)]
            if able:
                retract(engine, self.random.choice(able))
        elif chance < 0.5:
            for node in engine.tree.evictable()[:2]:
                engine.free_pages.put(engine.tree.evict(node))


def step(engine: Engine) -> None:
    """Where steps overlap, the host decides one while the last runs, and reads the last one's result only then."""
    admit(engine)
    launched = launch(engine)
    in_flight = 1 if launched and engine.shape.is_overlapped else 0
    while len(engine.launched) > in_flight:
        process(engine)
    if not engine.launched:  # nothing to wait for, and the device goes on
        engine.events.flush()
        engine.stream.run_all()


def cancel(engine: Engine, request: Request) -> None:
    """By its user."""
    if request.state is not State.SENDING:
        abort(engine, request)


def can_be_offloaded(node: Node) -> bool:
    """Its pages are in the pool alone, and what comes before it is in the host's memory, too."""
    above = node.parent
    is_above = above is not None and (above.parent is None or above.host_pages is not None)
    return node.pages is not None and node.host_pages is None and not node.is_busy and is_above


def compact(engine: Engine, random: Random) -> None:
    """Some whole pages of a request move elsewhere."""
    able = [one for one in engine.running if one.state is State.DECODE and one.computed]
    if not able:
        return
    request = random.choice(able)
    whole = request.computed // engine.shape.page_size
    first = max(request.num_shared, request.num_pruned)
    count = min(2, whole - first)
    sources = request.pages[first : first + max(count, 0)]
    targets = engine.free_pages.take(count) if sources and NULL_PAGE not in sources else None
    if targets is None:
        return
    engine.copy_pages(sources, targets)
    engine.events.move(sources, targets, request.row, first)
    request.pages[first : first + count] = targets
    engine.rows.write(request.row, first, targets)
    engine.free_pages.free.extend(sources)
