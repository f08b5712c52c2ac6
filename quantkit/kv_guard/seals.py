"""Seals of single records in Python integers, to explain a violation: see `quantkit_kernels.reference.kv_seals`."""

import torch

from quantkit.kv_guard.dispatch import MARK, twins

_WORD = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(x: int) -> int:
    """Splitmix64's finalizer."""
    x &= _WORD
    x = (x ^ (x >> 30)) * _FIRST & _WORD
    x = (x ^ (x >> 27)) * _SECOND & _WORD
    return x ^ (x >> 31)


def seal_of(generation: int, owner: int, index: int) -> int:
    """Without a page's mark, as an unsigned number."""
    return mix((mix(mix(generation) ^ (owner & _WORD)) + index) & _WORD)


def mark_of(page: int) -> int:
    """What makes a seal that of a page."""
    return mix(page + MARK)


def page_of_mark(mark: int) -> int:
    """The page of a mark; of other numbers one that no pool has, but for 2^-33."""
    signed = (mark & _WORD) - (mark >> 63 << 64)
    return (int(twins.unmix(torch.tensor([signed]))) - MARK) & _WORD
