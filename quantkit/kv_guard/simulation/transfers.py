"""Prefill and decode in separate pools: what one has computed is written into pages of the other, in no order."""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from random import Random

from quantkit.kv_guard.simulation.content import NUM_LAYERS
from quantkit.kv_guard.simulation.engine import Engine
from quantkit.kv_guard.simulation.events import numbers
from quantkit.kv_guard.simulation.memory import end, let_go, own_pages
from quantkit.kv_guard.simulation.requests import Request, State
from quantkit.kv_guard.simulation.stream import Lane, Op
from quantkit.kv_guard.simulation.watched import Known


@dataclass(slots=True, eq=False)
class Transfer:
    """Of the pages of ``request`` from logical page ``first`` on. ``granted`` is the operation of its engine's stream
    before which nobody may be told of them."""

    request: Request
    first: int
    pages: list[int]
    sources: list[int]
    number: int
    granted: int = 0
    held: list[Known] = field(default_factory=list)
    sent: int = 0  # the operation of the sender's stream that checks what it holds
    lanes: list[Lane] = field(default_factory=list)
    is_late: bool = False  # its pages were released without waiting for it: a fault


class Link:
    """Between two engines."""

    def __init__(self, prefill: Engine, decode: Engine, random: Random) -> None:
        self.prefill, self.decode = prefill, decode
        self.gap = 0  # operations of a stream between the last layer and the tags behind it, where a lane is late
        self._random = random
        self.transfers: list[Transfer] = []

    def submit(self, request: Request) -> None:
        """Its prompt is computed there; it waits here when that is done."""
        source = Request(
            name=request.name,
            tokens=request.tokens,
            num_prompt=request.num_prompt,
            total=request.total,
            words=request.words,
            known=request.known,
            device_known=request.known,
        )
        request.source = source
        self.prefill.submit(source)
        self.decode.named[request.name] = request

    def poll(self) -> None:
        """Begin what may begin, and take note of what has come."""
        self._pass_on()
        for request in list(self.decode.arriving):
            if all(one.request is not request for one in self.transfers):
                self.begin(request)
        for transfer in list(self.transfers):
            if not transfer.lanes and not transfer.is_late:
                if self.decode.stream.num_run >= transfer.granted:
                    self.tell(transfer)
            elif all(lane.is_done for lane in transfer.lanes):
                self.complete(transfer)

    def begin(self, request: Request) -> Transfer:
        """Pages were granted; whoever sends is told as soon as that is true on the device."""
        first = request.num_shared
        source = request.source
        assert source is not None, "nobody prefills for it"
        number = next(self.decode.around.transfers)
        transfer = Transfer(request, first, request.pages[first:], source.pages[first:], number)
        self.decode.events.announce(transfer.pages, number)
        transfer.granted = self.decode.put_copy(lambda: None)
        self.prefill.events.hold(source.pages, source.row, transfer.held.append)
        self.prefill.events.send(transfer.sources, lambda: transfer.held[0][first:])
        transfer.sent = self.prefill.put_copy(lambda: None)
        self.transfers.append(transfer)
        return transfer

    def tell(self, transfer: Transfer) -> None:
        """Pages go in some groups, in any order, and some of them twice."""
        places = list(range(len(transfer.pages)))
        self._random.shuffle(places)
        count = self._random.randint(1, 3)
        for group in (places[at::count] for at in range(count)):
            for _ in range(1 + (self._random.random() < 0.15)):
                lane = Lane(deque(self.parts(transfer, group)), lambda: self.prefill.stream.num_run >= transfer.sent)
                lane.pages = [transfer.pages[place] for place in group]
                transfer.lanes.append(self.decode.around.beside.add(lane))

    def parts(self, transfer: Transfer, places: list[int]) -> list[Op]:
        """The tags, each layer, and, behind the gap, the tags again: no content that is late comes without one behind
        it."""
        if not places:
            return []
        sources = numbers([transfer.sources[place] for place in places])
        pages = numbers([transfer.pages[place] for place in places])

        def tags() -> None:
            self.decode.judge.spread(self.prefill.name, sources.tolist(), self.decode.name, pages.tolist())
            if self.decode.tracker.is_on:
                sent = transfer.held[0][transfer.first :][numbers(places)] if transfer.held else None
                self.decode.tracker.land(pages, transfer.number, self.prefill.tracker.lift(sources, sent))

        def take(layer: int) -> None:
            self.decode.content.take(self.prefill.content, layer, sources, pages)
            self.decode.tracker.land_content(pages, transfer.number, self.prefill.tracker, sources)

        nothing = [lambda: None] * self.gap
        return [tags, *(partial(take, layer) for layer in range(NUM_LAYERS)), *nothing, tags]

    def restart(self) -> None:
        """Nothing is on its way."""
        self.transfers.clear()

    def _pass_on(self) -> None:
        """What is prefilled waits for pages; who was cancelled meanwhile is not waited for."""
        for source in list(self.prefill.sending):
            request = self.decode.named.get(source.name)
            if request is None and all(one.request.source is not source for one in self.transfers):
                self._release_source(source)
            elif request is not None and request.state is State.WAITING and request not in self.decode.waiting:
                self.decode.waiting.append(request)

    def complete(self, transfer: Transfer, *, is_told: bool = True) -> None:
        """All has landed, of every attempt; ``is_told``: the guard hears that it has arrived."""
        request, source = transfer.request, transfer.request.source
        assert source is not None, "nobody prefills for it"
        self.transfers.remove(transfer)
        self.prefill.events.sent(transfer.sources, lambda: transfer.held[0][transfer.first :])
        self._release_source(source)
        if request.state is State.ARRIVING:
            decode = self.decode
            if is_told:
                decode.events.arrive(transfer.pages, request, transfer.first)
            decode.arriving.remove(request)
            decode.running.append(request)
            request.state, request.source = State.DECODE, None
            request.known = request.device_known = request.num_prompt + 1
            request.computed = request.launched = request.num_prompt
        elif not transfer.is_late:
            self.decode.events.drained(transfer.pages, transfer.number)
            self.decode.free_pages.put(transfer.pages)  # it was cancelled, and its pages had to wait for this

    def _release_source(self, source: Request) -> None:
        pages = own_pages(source)
        let_go(self.prefill, source)
        self.prefill.free_pages.put(pages)
        end(self.prefill, source)
