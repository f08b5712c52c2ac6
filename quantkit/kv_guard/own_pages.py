"""Which pages a row may give back when its request is ended because of them: none that could be another's."""

import torch
from torch import Tensor

from quantkit.kv_guard.dispatch import NEVER, SPOILED, UNARRIVED, State, twins
from quantkit.kv_guard.page_arrays import PageArrays, places_of, read


def own_pages(arrays: PageArrays, row: int, first: int, pages: Tensor, drawn: tuple[int, int]) -> Tensor:
    """Of a row's places from ``first`` on that are named ``pages``, which pages are theirs: int64 [N], -1 for none.

    The page that is named, if it is what is expected; else whichever is; else, again, the one that is named, if a tag
    has landed there that no row expects: it was written over what was granted. A page that waits for a transfer, or is
    spoiled, is whose it was before. Where it is in doubt a page is lost rather than another's; none is given twice.
    ``drawn`` are the first generation of this pool and the next one: a tag of another has landed.
    """
    tags, expected = arrays.tags, arrays.expectations
    indices = torch.arange(first, first + len(pages), device=pages.device)
    seals = read(expected.seals_RL.view(-1), places_of(expected, torch.full_like(indices, row), indices), NEVER)
    found = tags.seals_P ^ twins.mark_of(torch.arange(tags.num_pages, device=pages.device))
    granted = twins.record_seals(tags.records_P3)
    has_landed = (found != granted) & (found != UNARRIVED) & (found != SPOILED)
    has_landed |= ~_is_between(tags.records_P3[:, 0], *drawn)
    own = torch.where(has_landed, found, granted)
    ordered, order = own.sort()
    at = torch.searchsorted(ordered, seals).clamp(max=tags.num_pages - 1)
    is_granted = ~twins.is_nothing(seals)
    is_somewhere = is_granted & (ordered[at] == seals) & (tags.states_P[order[at]] != State.FREE)
    is_inside = twins.is_in(pages, tags.num_pages)
    named = torch.where(is_inside, pages, 0)
    states = tags.states_P[named]
    is_nobodys = is_inside & is_granted & has_landed[named] & ~torch.isin(own[named], expected.seals_RL)
    is_nobodys &= (states == State.HELD) | (states == State.AWAITING)
    elsewhere = torch.where(is_somewhere, order[at], torch.where(is_nobodys, pages, -1))
    is_right = is_granted & is_inside & (own[named] == seals) & (states != State.FREE)
    given = torch.where(is_right, pages, elsewhere)
    return torch.where(twins.is_repeated(given), -1, given)


def _is_between(numbers: Tensor, first: int, end: int) -> Tensor:
    """From ``first`` on, counted round at 2^64, and before ``end``; int64 as bits."""
    smallest = -(1 << 63)  # what is nearest behind ``first`` becomes the smallest
    offsets = numbers - ((first + (1 << 63)) % (1 << 64) - (1 << 63)) + smallest
    return offsets < (end - first) % (1 << 64) + smallest
