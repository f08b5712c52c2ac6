"""The trackers of a worker: one for each group of layers, as large as its pool and its page table."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantkit.kv_guard.engines.settings import PluginSettings, check_memory, path_of
from quantkit.kv_guard.engines.vllm.settings import Group
from quantkit.kv_guard.page_tags import PageTagTracker
from quantkit.kv_guard.settings import GuardSettings, PoolSize

_NULL_PAGE = 0  # of every pool; no request is ever granted it
_BYTES_A_PLACE = 36 + 4  # of a row's logical page: what it expects, what a launched step captures, and the table
_BYTES_A_PAGE = 49


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
    check_memory(_num_bytes(widths), settings, f"{widths.num_rows} rows of {max(widths.most_pages)} pages")
    return [
        PageTagTracker(_settings_of(group, widths, number, settings, rank), device)
        for number, group in enumerate(groups)
    ]


def _settings_of(group: Group, widths: Widths, number: int, settings: PluginSettings, rank: int) -> GuardSettings:
    return GuardSettings(
        identity=group.identity,
        size=PoolSize(
            num_pages=widths.num_pages,
            page_size=group.page_size,
            num_rows=widths.num_rows,
            most_pages=widths.most_pages[number],
            null_page=_NULL_PAGE,
        ),
        mode=settings.mode,
        ring_lines=settings.ring_lines,
        incidents=path_of(settings.incidents, rank, number),
    )


def _num_bytes(widths: Widths) -> int:
    """Of all arrays that a worker makes."""
    return sum(widths.num_rows * most * _BYTES_A_PLACE + widths.num_pages * _BYTES_A_PAGE for most in widths.most_pages)
