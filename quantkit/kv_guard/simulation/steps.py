"""A step: which requests it runs, and what the device does for it, operation by operation.

Legend: B rows of the batch, padding at its end; L logical pages; S tokens of a page; T tokens that the step stores.
"""

from dataclasses import dataclass, field
from functools import partial

import torch

from quantkit.kv_guard.simulation.allocator import NULL_PAGE
from quantkit.kv_guard.simulation.content import DAMAGED, NUM_LAYERS, REFUSED, in_layer
from quantkit.kv_guard.simulation.engine import Engine
from quantkit.kv_guard.simulation.events import numbers
from quantkit.kv_guard.simulation.memory import grow, num_pages_of
from quantkit.kv_guard.simulation.requests import Request, State
from quantkit.kv_guard.tracker import Step

_BUCKET = 4  # batches are filled up to a multiple, as for captured graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a step does for one request: it stores ``count`` tokens from ``start`` on, of which ``num_right`` stay, and
    gains ``gain`` new ones. ``first`` is the first page that it sees, ``reserved`` how far it may reach for all that
    the host knows, ``tail`` the page of its first token."""

    request: Request
    epoch: int
    start: int
    count: int
    num_right: int
    gain: int
    first: int
    reserved: int
    is_chunk: bool
    row: int
    tail: int


@dataclass(slots=True, eq=False, kw_only=True)
class Launched:
    """A step in flight. Its operations of the stream: from ``begun`` on it reads, behind ``ended`` it does no more."""

    parts: list[Part]
    number: int = -1
    begun: int = 0
    ended: int = 0
    done: int = 0
    wrong: dict[int, set[int]] = field(default_factory=dict)  # pages where a part read what it should not


def launch(engine: Engine) -> Launched | None:
    """The next step for all that can run; None where nothing can."""
    parts, budget = [], engine.shape.chunk
    for request in list(engine.running):
        part = None
        if request.state is State.DECODE:
            part = _decoded(engine, request)
        elif request.state is State.PREFILL and budget > 0:
            part = _prefilled(engine, request, budget)
            budget -= part.count if part else 0
        if part:
            parts.append(part)
    parts = [part for part in parts if part.request.epoch == part.epoch]  # others were retracted for room
    if not parts:
        return None
    for part in parts:
        _count(engine, part)
    launched = Launched(parts=parts)
    _put(engine, launched)
    engine.launched.append(launched)
    return launched


def _decoded(engine: Engine, request: Request) -> Part | None:
    count = 1 + request.drafts
    reserved = request.known - 1 + (request.in_flight + 1) * count
    if not grow(engine, request, num_pages_of(engine, reserved)):
        return None
    gain = 1 + engine.around.random.randint(0, request.drafts)
    return Part(
        request=request,
        epoch=request.epoch,
        start=request.device_known - 1,
        count=count,
        num_right=gain,
        gain=gain,
        first=_pruned(engine, request, request.known - 1),
        reserved=reserved,
        is_chunk=False,
        row=request.row,
        tail=request.pages[(request.device_known - 1) // engine.shape.page_size],
    )


def _prefilled(engine: Engine, request: Request, budget: int) -> Part | None:
    count = min(budget, request.known - request.launched)
    reserved = request.launched + count
    if not grow(engine, request, num_pages_of(engine, reserved)):
        return None
    return Part(
        request=request,
        epoch=request.epoch,
        start=request.launched,
        count=count,
        num_right=count,
        gain=int(reserved == request.known),
        first=_pruned(engine, request, request.launched),
        reserved=reserved,
        is_chunk=True,
        row=request.row,
        tail=request.pages[request.launched // engine.shape.page_size],
    )


def _count(engine: Engine, part: Part) -> None:
    """What will be so when the step is done."""
    request = part.request
    request.in_flight += 1
    request.device_known += part.gain
    if part.is_chunk:
        request.launched += part.count
        if part.gain:
            request.state = State.DECODE if engine.shape.decodes else State.SENDING


def _pruned(engine: Engine, request: Request, start: int) -> int:
    """The first page that a query at ``start`` sees; those before it are given up, behind the step in flight."""
    if engine.shape.window is None:
        return 0
    first = max(0, start - engine.shape.window + 1) // engine.shape.page_size
    if first > request.num_pruned:
        before = range(max(request.num_pruned, request.num_shared), first)
        pages = [request.pages[index] for index in before if request.pages[index] != NULL_PAGE]
        for index in before:
            request.pages[index] = NULL_PAGE
        if engine.shape.null_pages:
            engine.events.prune(request.row, first)
            engine.rows.write(request.row, request.num_pruned, [NULL_PAGE] * (first - request.num_pruned))
        engine.free_pages.put(pages)
        request.num_pruned = first
    return first


def _put(engine: Engine, launched: Launched) -> None:
    """All operations of a step, on the stream."""
    engine.events.flush()
    written = engine.rows.written()
    if written:
        engine.stream.put(written)
    forward = Forward(engine, launched)
    launched.begun = engine.stream.put(forward.begin)
    for layer in range(NUM_LAYERS):
        engine.stream.put(partial(forward.write, layer))
        launched.ended = engine.stream.put(partial(forward.read, layer))
    launched.done = engine.stream.put(forward.end)
    engine.num_steps += 1


class Forward:
    """What the device does."""

    def __init__(self, engine: Engine, launched: Launched) -> None:
        parts, shape = launched.parts, engine.shape
        self._engine, self._launched = engine, launched
        self._lives = [(part.request.name, part.epoch) for part in parts]
        num_padded = -len(parts) % _BUCKET or (engine.padding_slot > 0) * _BUCKET
        padding = [0] * num_padded
        self._rows_B = numbers([part.request.row for part in parts] + padding)
        starts, counts = numbers([part.start for part in parts]), numbers([part.count for part in parts])
        lengths_B = numbers([part.start + part.count for part in parts] + [1] * num_padded)
        firsts = None
        if shape.window is not None:
            firsts = numbers([part.first for part in parts] + padding)
        self._most_pages = max(num_pages_of(engine, part.reserved) for part in parts)
        self._step = Step(
            table=engine.rows.table,
            rows=self._rows_B,
            lengths=lengths_B,
            most_pages=self._most_pages,
            firsts=firsts,
            by_token=shape.by_token,
            is_steady=True,
        )
        engine.num_checks += 2 * sum(num_pages_of(engine, part.start + part.count) - part.first for part in parts)
        self._batch_T = torch.repeat_interleave(torch.arange(len(parts)), counts)
        offsets_T = torch.arange(len(self._batch_T)) - (counts.cumsum(0) - counts)[self._batch_T]
        self._positions_T = starts[self._batch_T] + offsets_T
        rights = numbers([part.num_right for part in parts])
        self._refused_T = torch.where(offsets_T < rights[self._batch_T], 0, REFUSED)
        self._right_ends = starts + rights
        self._padding_slots = numbers([engine.padding_slot] * num_padded)
        engine.padding_slot = -1
        num_tokens = self._most_pages * shape.page_size
        self._truth_BT = torch.stack([part.request.words[:num_tokens] for part in parts])
        self._window_starts = starts * 0 if shape.window is None else (starts - shape.window + 1).clamp(min=0)
        self._is_wrong_B = torch.zeros(len(parts), dtype=torch.bool)
        self._slots = self._padding_slots

    def begin(self) -> None:
        """Where tokens go is read from the table, as what is read will be; both are checked."""
        engine, shape = self._engine, self._engine.shape
        rows_T, positions_T = self._rows_B[self._batch_T], self._positions_T
        if shape.by_token:
            slots = engine.rows.table[rows_T, positions_T].long()
        else:
            pages = engine.rows.table[rows_T, positions_T // shape.page_size].long()
            slots = pages * shape.page_size + positions_T % shape.page_size
        self._slots = torch.cat((slots, self._padding_slots))
        if engine.tracker.is_on:
            padding = torch.zeros_like(self._padding_slots)
            self._launched.number = engine.tracker.before_step(self._step)
            engine.tracker.check_writes(self._slots, torch.cat((rows_T, padding)), torch.cat((positions_T, padding)))

    def write(self, layer: int) -> None:
        """A token whose attention read something wrong in the layer before is wrong from here on."""
        words_T = in_layer(self._truth_BT[self._batch_T, self._positions_T], layer) ^ self._refused_T
        words_T = torch.where(self._is_wrong_B[self._batch_T], words_T ^ DAMAGED, words_T)
        words = torch.nn.functional.pad(words_T, (0, len(self._padding_slots)), value=DAMAGED)
        flat = self._engine.content.words_LPS[layer].view(-1)
        is_stored = (self._slots >= 0) & (self._slots < len(flat))
        flat[self._slots[is_stored]] = words[is_stored]

    def read(self, layer: int) -> None:
        """Attention sees all pages that the table names now."""
        engine, shape = self._engine, self._engine.shape
        table, rows = engine.rows.table, self._rows_B[: len(self._is_wrong_B), None]
        num_tokens = self._truth_BT.shape[1]
        content = engine.content.words_LPS[layer]
        if shape.by_token:
            slots_BT = table[rows, torch.arange(num_tokens)].long()
            pages_BL = slots_BT[:, :: shape.page_size] // shape.page_size
            words_BT = content.view(-1)[slots_BT.clamp(0, content.numel() - 1)]
        else:
            pages_BL = table[rows, torch.arange(self._most_pages)].long()
            words_BT = content[pages_BL.clamp(0, len(content) - 1)].reshape(-1, num_tokens)
        position_1T = torch.arange(num_tokens)
        is_seen_BT = (position_1T < self._right_ends[:, None]) & (position_1T >= self._window_starts[:, None])
        if engine.judge.active:
            is_seen_BL = is_seen_BT.reshape(len(pages_BL), -1, shape.page_size).any(2)
            engine.judge.feel(engine.name, self._lives, torch.where(is_seen_BL, pages_BL, -1), self._launched.begun)
        is_other_BT = is_seen_BT & (words_BT != in_layer(self._truth_BT, layer))
        self._is_wrong_B |= is_other_BT.any(1)
        if bool(self._is_wrong_B.any()):
            is_other_BL = is_other_BT.reshape(len(pages_BL), -1, shape.page_size).any(2)
            for at, pages in enumerate(pages_BL):
                if self._is_wrong_B[at]:
                    self._launched.wrong.setdefault(at, set()).update(pages[is_other_BL[at]].tolist())
                    stored = self._slots[: len(self._batch_T)][self._batch_T == at] // shape.page_size
                    engine.judge.compute(engine.name, self._launched.wrong[at], stored.tolist())

    def end(self) -> None:
        """The same pages once more."""
        if self._engine.tracker.is_on:
            self._engine.tracker.after_step()
