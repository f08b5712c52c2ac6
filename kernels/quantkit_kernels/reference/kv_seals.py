"""Seals of KV pages in plain torch.

Seal of a record (generation g, owner o, logical index i), in 64-bit integers that wrap, with ``mix`` the finalizer of
splitmix64, a bijection:

    seal(g, o, i) = mix(mix(mix(g) ^ o) + i)            stored at page p: seal ^ mix(p + MARK)

What is expected of a logical page is the seal alone; a page passes where the stored one less its mark is that. Let two
tags differ in one of generation, owner, index and page: they never pass for each other, since each step is a bijection.
Let them differ in more: for any other three, exactly one of the 2^64 owners passes. An owner is a keyed digest, which
whoever does not know the key meets with probability 2^-64. Neither depends on how often generations were counted round.
"""

import torch
from torch import Tensor

from quantkit_kernels.kv_tag_arrays import FIRST_SEAL, MARK, PLACE_MASK

_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_UNDO_FIRST = 0x96DE1B173F119089 - (1 << 64)  # times _FIRST is 1
_UNDO_SECOND = 0x319642B2D24D8EC3
assert _FIRST * _UNDO_FIRST % (1 << 64) == _SECOND * _UNDO_SECOND % (1 << 64) == 1


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Right, with zeros from the left, as torch has it for unsigned integers alone."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Splitmix64's finalizer of int64, as bits."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def unmix(x: Tensor) -> Tensor:
    """The number whose `mix` is ``x``."""
    for bits, factor in ((31, _UNDO_SECOND), (27, _UNDO_FIRST), (30, 1)):
        undone = x
        for shift in range(bits, 64, bits):
            undone = undone ^ _shifted(x, shift)
        x = undone * factor
    return x


def seal_of(generation: Tensor, owner: Tensor, index: Tensor) -> Tensor:
    """Of records, without a page's mark."""
    return mix(mix(mix(generation) ^ owner) + index)


def mark_of(pages: Tensor) -> Tensor:
    """What makes a seal that of a page."""
    return mix(pages.long() + MARK)


def record_seals(records_N3: Tensor) -> Tensor:
    """Of whole records; a checksum is no part of it."""
    return seal_of(records_N3[:, 0], records_N3[:, 1], records_N3[:, 2] & PLACE_MASK)


def generations(first: int, count: int, device: torch.device) -> Tensor:
    """``count`` numbers from ``first`` on, int64 as bits: beyond 2^63 they are negative, and 2^64 is followed by 1."""
    start = (first + (1 << 63)) % (1 << 64) - (1 << 63)
    numbers = torch.arange(count, dtype=torch.int64, device=device) + start
    return numbers + ((numbers >= 0) & (start < 0)).long()  # counted round: 0 means that nothing was granted


def is_nothing(seals: Tensor) -> Tensor:
    """Whoever expects them was granted nothing."""
    return (seals & -FIRST_SEAL) == 0
