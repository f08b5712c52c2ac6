"""The trackers of a worker: one for each group of layers, as large as its pool and its page table."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantkit.kv_guard.engines.settings import PluginSettings, check_memory
from quantkit.kv_guard.engines.vllm.settings import Group
from quantkit.kv_guard.page_tags import PageTagTracker
from quantkit.kv_guard.settings import PoolSize

_NULL_PAGE = 0  # of every pool; no request is ever granted it
_BYTES_AN_ENTRY = 4  # of the page table that a worker keeps for each tracker


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Of a worker: its pool, how many requests, and the width of each group's page table."""

    num_pages: int
    num_rows: int
    most_pages: Sequence[int]
    most_tokens: int  # of a step


def trackers_of(
    groups: Sequence[Group], widths: Widths, settings: PluginSettings, device: torch.device, rank: int
) -> list[PageTagTracker]:
    """Raises KvGuardError where all arrays of a worker would take more than they may."""
    sizes = [_size(group, widths, most) for group, most in zip(groups, widths.most_pages, strict=True)]
    num_bytes = sum(size.num_bytes + size.num_rows * size.most_pages * _BYTES_AN_ENTRY for size in sizes)
    check_memory(num_bytes, settings, f"{widths.num_rows} rows of {max(widths.most_pages)} pages")
    return [
        PageTagTracker(settings.of_tracker(group.identity, size, rank, number), device)
        for number, (group, size) in enumerate(zip(groups, sizes, strict=True))
    ]


def _size(group: Group, widths: Widths, most_pages: int) -> PoolSize:
    return PoolSize(
        num_pages=widths.num_pages,
        page_size=group.page_size,
        num_rows=widths.num_rows,
        most_pages=most_pages,
        null_page=_NULL_PAGE,
    )
