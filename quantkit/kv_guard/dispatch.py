"""The one place of the guard that chooses between kernels and their twins, and names what both share."""

from types import ModuleType

import torch

from quantkit_kernels.kv_tag_arrays import (
    BEYOND,
    FREE_INDEX,
    HOLE,
    MARK,
    MOST_PAGES,
    NEVER,
    PLACE_MASK,
    PRUNED,
    SHIFTED,
    SPOILED,
    UNARRIVED,
    UNGRANTED,
    Captured,
    Check,
    Expectations,
    PageTags,
    Ring,
    State,
    Word,
    new_captured,
    new_expectations,
    new_ring,
    new_tags,
)
from quantkit_kernels.reference import kv_tags as twins

__all__ = [
    "BEYOND",
    "FREE_INDEX",
    "HOLE",
    "MARK",
    "MOST_PAGES",
    "NEVER",
    "PLACE_MASK",
    "PRUNED",
    "SHIFTED",
    "SPOILED",
    "UNARRIVED",
    "UNGRANTED",
    "Captured",
    "Check",
    "Expectations",
    "PageTags",
    "Ring",
    "State",
    "Word",
    "new_captured",
    "new_expectations",
    "new_ring",
    "new_tags",
    "ops_for",
    "twins",
]


def ops_for(device: torch.device) -> ModuleType:
    """Kernels where there is a GPU; plain torch elsewhere, where they would run in an interpreter."""
    if device.type != "cuda":
        return twins
    from quantkit_kernels import kv_tags

    return kv_tags
