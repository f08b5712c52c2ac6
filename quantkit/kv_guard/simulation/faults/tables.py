"""Rows that name wrong pages, and tokens that go to wrong slots: kinds 4, 10 and 11."""

from collections.abc import Iterator

import torch

from quantkit.kv_guard.simulation.admission import find_prefix, start
from quantkit.kv_guard.simulation.allocator import NULL_PAGE
from quantkit.kv_guard.simulation.events import numbers
from quantkit.kv_guard.simulation.faults.scripts import (
    awaited,
    claim,
    fire,
    fire_behind,
    foreign_page,
    is_quiet,
    parts_in_flight,
    row_pages,
    running,
    seen_pages,
    settled,
    strike,
)
from quantkit.kv_guard.simulation.judge import Injection
from quantkit.kv_guard.simulation.memory import num_pages_of, own_pages
from quantkit.kv_guard.simulation.requests import Request, State
from quantkit.kv_guard.simulation.steps import Launched, Part
from quantkit.kv_guard.simulation.world import World


def stale_row(world: World, injection: Injection) -> Iterator[None]:
    """Kind 4: a row is rewritten before the step reads it, or while it does; or its new entry is lost, and an old one
    is read."""
    way = world.random.choice(("before", "during", "lost"))
    if way == "lost":
        yield from _lose_entry(world, injection)
    else:
        yield from _rewrite(world, injection, behind_begin=way == "during")


def _rewrite(world: World, injection: Injection, *, behind_begin: bool) -> Iterator[None]:
    def find() -> tuple[Launched, Part, int] | None:
        for launched, part in parts_in_flight(world):
            page = foreign_page(world, part.request)
            if page is not None and len(seen_pages(world, part)):
                return launched, part, page
        return None

    found = yield from awaited(find)
    if found is None:
        return
    launched, part, page = found
    claim(world, injection, [page], [part.request])
    index = world.random.choice(seen_pages(world, part))

    def rewrite() -> None:
        if part.request.epoch == part.epoch:
            fire(world, injection, [page], [part.request])
            world.decode.rows.put_entries(numbers([part.row]), numbers([index]), numbers([page]))

    strike(world, launched.begun - (not behind_begin), rewrite)
    yield from settled(injection)


def _lose_entry(world: World, injection: Injection) -> Iterator[None]:
    engine = world.decode

    def find() -> Request | None:
        for request in running(world, State.DECODE):
            reserved = request.known - 1 + (request.in_flight + 1) * (1 + request.drafts)
            # with room for drafts the new page may not be read yet
            if not request.drafts and num_pages_of(engine, reserved) > len(request.pages):
                return request
        return None

    request = yield from awaited(find)
    if request is None:
        return
    place = request.row, len(request.pages)
    old = engine.rows.entry(*place)
    fire_behind(world, injection, [old], [request])
    engine.rows.losing.add(place)
    yield
    if engine.rows.lost.get(place, old) == old:  # it was sent away before it wrote, or got the same page again
        engine.rows.losing.discard(place)
        injection.is_fired = False
        return
    claim(world, injection, [], [one for one in engine.running if one.row == place[0]])  # another has the row by now
    yield from settled(injection)


def off_by_one(world: World, injection: Injection) -> Iterator[None]:
    """Kind 10: a row is shifted by a page, or by a token where it names tokens; or a prefix that ends with a page is
    taken to be a page longer."""
    if world.random.random() < 0.5 and world.decode.shape.is_overlapped:
        yield from _shift(world, injection)
    else:
        yield from _one_too_many(world, injection)


def _shift(world: World, injection: Injection) -> Iterator[None]:
    def find() -> tuple[Launched, Part] | None:
        return next((one for one in parts_in_flight(world) if len(seen_pages(world, one[1])) > 1), None)

    found = yield from awaited(find)
    if found is None:
        return
    launched, part = found
    rows, seen = world.decode.rows, seen_pages(world, part)
    claim(world, injection, row_pages(part.request), [part.request])

    def shift() -> None:
        if part.request.epoch == part.epoch:
            fire(world, injection, row_pages(part.request), [part.request])
            pages = [rows.entry(part.row, index) for index in seen[:-1]]
            rows.put_entries(numbers([part.row] * len(pages)), numbers(seen[1:]), numbers(pages))

    def shift_tokens() -> None:
        if part.request.epoch == part.epoch:
            fire(world, injection, row_pages(part.request), [part.request])
            table, size = rows.table, world.decode.shape.page_size
            begin, end = seen[0] * size, part.start + part.num_right
            table[part.row, begin + 1 : end] = table[part.row, begin : end - 1].clone()

    by_token = world.decode.shape.by_token and world.random.random() < 0.5
    strike(world, launched.begun - 1, shift_tokens if by_token else shift)
    yield from settled(injection)


def _one_too_many(world: World, injection: Injection) -> Iterator[None]:
    engine = world.decode

    def find() -> tuple[Request, int] | None:
        for request in engine.waiting:
            if request.source is None and engine.rows.free and is_quiet(world, request):
                node = find_prefix(engine, request)
                is_longer = request.known > (node.end + 1) * engine.shape.page_size
                is_there = all(one.pages is not None for one in node.path())
                page = foreign_page(world, request)
                if is_longer and is_there and page is not None:
                    return request, page
        return None

    found = yield from awaited(find)
    if found is None:
        return
    request, page = found
    fire_behind(world, injection, [page], [request])
    start(engine, request, find_prefix(engine, request))
    engine.rows.write(request.row, len(request.pages), [page])
    request.pages.append(page)
    request.computed += engine.shape.page_size
    request.launched += engine.shape.page_size
    yield from settled(injection)


def padding(world: World, injection: Injection) -> Iterator[None]:
    """Kind 11: slot -1 becomes the last one; or the null page is read as data."""
    way = world.random.choice(("slot", "null", "missing"))
    if way == "missing":
        yield from _miss_page(world, injection)
    elif way == "null" and world.decode.shape.is_overlapped:
        yield from _name_null_page(world, injection)
    else:
        yield from _write_last_slot(world, injection)


def _write_last_slot(world: World, injection: Injection) -> Iterator[None]:
    engine = world.decode
    last, page_size = engine.shape.num_pages - 1, engine.shape.page_size

    def find() -> Request | None:
        engine.free_pages.prefer([last])
        for request in running(world, State.DECODE):
            if last in own_pages(request) and request.total - request.known > 4:
                index = request.pages.index(last)
                return request if (index + 1) * page_size <= request.computed else None
        return None

    request = yield from awaited(find)
    if request is not None:
        fire_behind(world, injection, [last], [request])
        engine.padding_slot = last * page_size + page_size - 1
        yield from settled(injection)


def _name_null_page(world: World, injection: Injection) -> Iterator[None]:
    def find() -> tuple[Launched, Part] | None:
        return next((one for one in parts_in_flight(world) if len(seen_pages(world, one[1]))), None)

    found = yield from awaited(find)
    if found is None:
        return
    launched, part = found
    index = world.random.choice(seen_pages(world, part))
    claim(world, injection, [], [part.request])

    def name() -> None:
        if part.request.epoch == part.epoch:
            fire(world, injection, [NULL_PAGE], [part.request])
            world.decode.rows.put_entries(numbers([part.row]), numbers([index]), torch.zeros(1, dtype=torch.int32))

    strike(world, launched.begun - 1, name)
    yield from settled(injection)


def _miss_page(world: World, injection: Injection) -> Iterator[None]:
    """Nothing was granted where a request goes on, and the null page stands there."""
    engine = world.decode

    def find() -> Request | None:
        for request in running(world, State.DECODE):
            is_next = request.device_known % engine.shape.page_size <= 1
            if is_next and num_pages_of(engine, request.device_known) == len(request.pages) + 1:
                return request
        return None

    request = yield from awaited(find)
    if request is None:
        return
    fire_behind(world, injection, [NULL_PAGE], [request])
    engine.rows.write(request.row, len(request.pages), [NULL_PAGE])
    request.pages.append(NULL_PAGE)
    yield from settled(injection)
