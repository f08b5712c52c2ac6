"""Which pages a row may give back when its request is ended because of them: those that were granted to it last."""

import torch
from torch import Tensor

from quantkit.kv_guard.dispatch import HOLE, NEVER, State, twins
from quantkit.kv_guard.page_arrays import PageArrays, places_of, read


def own_pages(arrays: PageArrays, granted_P: Tensor, row: int, first: int, count: int) -> Tensor:
    """Of ``count`` places of a row from ``first`` on, the pages that were granted for them: int64 [count], -1 for none.

    ``granted_P`` are the generations under which pages were granted last, whatever lies there by now: a generation is
    that of one grant, and 0 that of none. A page that was released since, or granted again, is none of the row's.
    """
    expected = arrays.expectations
    indices = torch.arange(first, first + count, device=granted_P.device)
    places = places_of(expected, torch.full_like(indices, row), indices)
    seals = read(expected.seals_RL.view(-1), places, NEVER)
    generations = read(expected.details_RL2.view(-1, 2), places, 0)[:, 0].contiguous()
    ordered, order = granted_P.sort()
    at = torch.searchsorted(ordered, generations).clamp(max=len(granted_P) - 1)
    is_own = (generations != 0) & (ordered[at] == generations) & (arrays.tags.states_P[order[at]] != State.FREE)
    own = torch.where(is_own & (~twins.is_nothing(seals) | (seals == HOLE)), order[at], -1)
    return torch.where(twins.is_repeated(own), -1, own)
