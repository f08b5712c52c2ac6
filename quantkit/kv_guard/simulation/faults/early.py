"""Transfers that are taken for complete before they are."""

from collections.abc import Iterator

from quantkit.kv_guard.simulation.faults.scripts import awaited, fire_behind, is_quiet, settled
from quantkit.kv_guard.simulation.judge import Injection
from quantkit.kv_guard.simulation.requests import State
from quantkit.kv_guard.simulation.transfers import Transfer
from quantkit.kv_guard.simulation.world import World


def early_reader(world: World, injection: Injection) -> Iterator[None]:
    """A request goes on while its pages are still on their way; or all is said to have come before any of it has."""
    link = world.link
    assert link is not None, "nothing is transferred"

    def find() -> Transfer | None:
        for transfer in link.transfers:
            is_able = transfer.request.state is State.ARRIVING and is_quiet(world, transfer.request)
            if is_able and transfer.pages and world.decode.stream.num_run >= transfer.granted:
                if not transfer.lanes:
                    link.tell(transfer)
                return transfer
        return None

    transfer = yield from awaited(find)
    if transfer is None:
        return
    whole = len(link.parts(transfer, [0]))
    has_begun = any(len(lane.parts) < whole for lane in transfer.lanes if lane.pages)
    for lane in transfer.lanes:
        lane.may_begin = lambda: False
    fire_behind(world, injection, transfer.pages, [transfer.request])
    link.complete(transfer, is_told=not has_begun and world.random.random() < 0.3)
    at = world.decode.stream.num_put + world.random.randint(2, 12)
    injection.lanes = list(transfer.lanes)
    for lane in transfer.lanes:
        lane.must_run = lambda: world.decode.stream.num_run >= at
    yield from settled(injection)
