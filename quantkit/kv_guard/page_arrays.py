"""The arrays of a guarded pool, at pages and rows that an engine names: what it does not have is nobody's, and is not
written. Nothing waits for the device, so that no list is cut to what is right in it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.kv_guard.dispatch import (
    Expectations,
    PageTags,
    Ring,
    Word,
    new_expectations,
    new_ring,
    new_tags,
    twins,
)
from quantkit.kv_guard.settings import PoolSize

Words = dict[Word, Tensor | int]
"""Of lines: a number each [N], or one for all."""
NO_TRANSFER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PageArrays:
    """What lies beside a pool. A page is touched in which a tag had landed when it was handed on, or to which by then a
    transfer might have written that is gone: announced for a former holder, and not over."""

    tags: PageTags
    expectations: Expectations
    ring: Ring
    transfers_P: Tensor  # int64: which of them was announced last
    gone_P: Tensor  # int32: how many
    touched_P: Tensor  # bool
    granted_P: Tensor  # int64: generations of the last grants, kept once tags may land over them; 0: of none


def new_arrays(size: PoolSize, ring_lines: int, device: torch.device | str) -> PageArrays:
    """Nothing is sealed, and no transfer was announced."""
    tags = new_tags(size.num_pages, device)
    return PageArrays(
        tags=tags,
        expectations=new_expectations(size.num_rows, size.most_pages, device),
        ring=new_ring(ring_lines, device),
        transfers_P=torch.full_like(tags.seals_P, NO_TRANSFER),
        gone_P=torch.zeros_like(tags.states_P),
        touched_P=torch.zeros_like(tags.states_P, dtype=torch.bool),
        granted_P=torch.zeros_like(tags.seals_P),
    )


def read(array: Tensor, at_N: Tensor, other: int) -> Tensor:
    """[N] or [N, ...], ``other`` where the array does not reach."""
    is_inside = twins.is_in(at_N, len(array))
    values = array[torch.where(is_inside, at_N, 0)]
    return torch.where(is_inside.view(-1, *[1] * (values.ndim - 1)), values, other)


def put(array: Tensor, at_N: Tensor, values: Tensor | int, where_N: Tensor | None = None) -> None:
    """Write ``values`` [N] or [N, ...] where the array reaches, and only ``where`` it is said.

    An entry that is not meant repeats the first that is; where none is, the array's first element is what it was.
    """
    if not len(at_N):
        return
    is_meant = twins.is_in(at_N, len(array))
    if where_N is not None:
        is_meant &= where_N
    entries = torch.where(is_meant, torch.arange(len(at_N), device=at_N.device), is_meant.long().argmax())
    is_any = is_meant.any()
    places = torch.where(is_any, at_N[entries], 0)
    meant = values[entries] if isinstance(values, Tensor) else values
    array.index_put_((places,), torch.where(is_any, meant, array[places]))


def states_of(tags: PageTags, pages_N: Tensor) -> Tensor:
    """-1 of pages that the pool does not have."""
    return read(tags.states_P, pages_N, -1)


def places_of(expectations: Expectations, rows_N: Tensor, indices_N: Tensor) -> Tensor:
    """Of logical pages in the flat arrays of expectations; -1 for those that there are none of."""
    num_rows, row_pages = expectations.seals_RL.shape
    is_place = twins.is_in(rows_N, num_rows) & twins.is_in(indices_N, row_pages)
    return torch.where(is_place, rows_N * row_pages + indices_N, -1)
