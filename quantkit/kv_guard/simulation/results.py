"""What the host does with a step's result: first the verdict, then the tokens."""

from collections.abc import Iterable

from quantkit.kv_guard.simulation.engine import Engine
from quantkit.kv_guard.simulation.memory import (
    abort,
    cache_computed,
    finish,
    give,
    hold,
    num_pages_of,
)
from quantkit.kv_guard.simulation.requests import Request, State
from quantkit.kv_guard.simulation.steps import Launched, Part


def process(engine: Engine) -> None:
    """The oldest step in flight. Releases are put off until all of it is processed."""
    launched = engine.launched.popleft()
    engine.stream.run_to(launched.done)
    engine.free_pages.begin_group()
    if engine.tracker.is_on:
        verdict, wrongs = engine.tracker.verdict(launched.number)
        engine.judge.see(engine.name, verdict, wrongs)
        end_named(engine, verdict.aborted)
    for at, part in enumerate(launched.parts):
        if part.request.epoch == part.epoch:
            _take_result(engine, part, launched.wrong.get(at), launched)
    engine.free_pages.end_group()


def end_named(engine: Engine, names: Iterable[str]) -> None:
    """Those that the guard wants ended."""
    for name in names:
        request = engine.named.get(name)
        if request is not None:
            abort(engine, request)


def _take_result(engine: Engine, part: Part, wrong: set[int] | None, launched: Launched) -> None:
    request = part.request
    request.in_flight -= 1
    if part.gain and wrong is not None:
        engine.judge.leak(engine.name, request.name, wrong)
        abort(engine, request)  # so that one leak does not make others
        return
    request.known = min(request.known + part.gain, request.total)
    request.computed = part.start + part.count if part.is_chunk else request.known - 1
    if part.is_chunk:
        cache_computed(engine, request, request.computed)
        if part.gain and not engine.shape.decodes:
            engine.running.remove(request)
            engine.sending.append(request)
            return
        if part.gain and request.forks:
            _fork(engine, request)
    if request.known >= request.total:
        if engine.traffic and not request.num_pruned:
            engine.traffic.answered(request)
        finish(engine, request)
    elif request.drafts and not part.is_chunk:
        _roll_back(engine, request)


def _roll_back(engine: Engine, request: Request) -> None:
    """Pages that were reserved for drafts which were refused go back, but for those of the step in flight."""
    reserved = request.known - 1 + request.in_flight * (1 + request.drafts)
    kept = max(num_pages_of(engine, reserved), request.num_shared)
    if kept < len(request.pages):
        pages, request.pages = request.pages[kept:], request.pages[:kept]
        engine.events.truncate(request.row, kept)
        engine.free_pages.put(pages)


def _fork(engine: Engine, parent: Request) -> None:
    """Other answers to the same prompt: rows that share its whole pages, and write on in copies of the last."""
    count, parent.forks = parent.forks, 0
    whole, rest = divmod(parent.num_prompt, engine.shape.page_size)
    for _ in range(count if engine.traffic else 0):
        assert engine.traffic is not None
        child = engine.traffic.forked(parent)
        is_able = parent.node is not None and parent.num_shared == whole and not parent.num_pruned
        pages = engine.free_pages.take(1 if rest else 0) if is_able and engine.rows.free else None
        if pages is None:
            engine.submit(child)
            continue
        begin_fork(engine, parent, child, pages, parent.num_shared)


def begin_fork(engine: Engine, parent: Request, child: Request, pages: list[int], num_read: int) -> None:
    """A row that reads the first pages of another, and writes on in a copy of the next where ``pages`` has one."""
    whole = parent.num_shared
    engine.named[child.name] = child
    child.row = engine.rows.free.pop()
    engine.events.open(child.row, child.name)
    child.pages = parent.pages[:num_read]
    engine.events.fork(parent.row, child.row, list(child.pages))
    engine.rows.write(child.row, 0, child.pages)
    assert parent.node is not None
    hold(engine, child, parent.node)
    child.known = child.device_known = child.num_prompt + 1
    child.computed = child.launched = child.num_prompt
    if pages:
        give(engine, child, pages)
        engine.copy_pages([parent.pages[whole]], pages)
        engine.events.copied(parent.pages[whole], parent.row, whole, child.row)
    child.state = State.DECODE
    engine.running.append(child)
