"""Crc32c of a page's bytes over all layers, for cold paths: offload, load-back, transfer. The simulation sums; of the
plugins neither does.

A tag says whose page it is and nothing of its content: a transfer that was torn, or a bit that turned over, shows in a
sum that was taken before and again behind. On a CPU google-crc32c computes it where it is installed, hundreds of
times as fast as torch; elsewhere, and on a GPU, torch does, with equal bits and without waiting for the device.

A sum that begins at zero is linear over bits. With A(n) what n zero bytes make of a state, two halves of a message are
joined by A(bytes of the second)(sum of the first) ^ sum of the second: so words are joined pairwise, level by level,
each A four look-ups in a table of 256.

Legend: P pages of a pool, N pages that are asked for, B bytes, W words of four bytes, 256 values of a byte.
"""

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

_POLYNOMIAL = 0x82F6_3B78  # Castagnoli's, bits reversed
_ONES = 0xFFFF_FFFF
_BYTE = 0xFF


class PageChecksums:
    """Of the pages of one pool. ``layers`` [P, ...] of any dtype; a page's bytes are those of each layer in turn."""

    def __init__(self, layers: Sequence[Tensor]) -> None:
        self._layers = [layer.reshape(len(layer), -1).view(torch.uint8) for layer in layers]
        assert all(one.data_ptr() == own.data_ptr() for one, own in zip(self._layers, layers, strict=True)), "a copy"
        self._is_here = not self._layers[0].is_cuda and find_spec("google_crc32c") is not None
        if self._layers[0].is_cuda:  # the tables go to the device now, and no later call waits for them
            self.of(torch.zeros(1, dtype=torch.int64, device=self._layers[0].device))

    def of(self, pages: Tensor) -> Tensor:
        """Of ``pages`` int64 [N], as int64 [N] below 2^32, on the device of the layers."""
        return sums_by_library(self._layers, pages) if self._is_here else sums_by_torch(self._layers, pages)


def sums_by_library(layers_PB: Sequence[Tensor], pages: Tensor) -> Tensor:
    """On the CPU."""
    extend = import_module("google_crc32c").extend
    arrays = [layer.numpy() for layer in layers_PB]
    sums = []
    for page in pages.tolist():
        state = 0
        for array in arrays:
            state = extend(state, array[page])
        sums.append(state)
    return torch.tensor(sums, dtype=torch.int64)


def sums_by_torch(layers_PB: Sequence[Tensor], pages: Tensor) -> Tensor:
    """On any device."""
    joined = torch.zeros(len(pages), dtype=torch.int32, device=pages.device)
    for layer in layers_PB:
        joined = _behind_zeros(joined, layer.shape[1]) ^ _linear_sums(layer[pages])
    num_bytes = sum(layer.shape[1] for layer in layers_PB)
    begun = (
        _applied(_zeros_matrix(num_bytes), _ONES) ^ _ONES
    )  # all bits are set before the first byte, and turned at last
    return (joined.long() & _ONES) ^ begun


def _linear_sums(bytes_NB: Tensor) -> Tensor:
    """Of rows of bytes, beginning at zero, as int32; zeros in front change nothing."""
    missing = -bytes_NB.shape[1] % 4
    words_NW = torch.nn.functional.pad(bytes_NB, (missing, 0)).view(torch.int32)
    num_bytes = 4
    while words_NW.shape[1] > 1:
        if words_NW.shape[1] % 2:
            words_NW = torch.nn.functional.pad(words_NW, (1, 0))
        words_NW = _behind_zeros(words_NW[:, 0::2], num_bytes) ^ words_NW[:, 1::2]
        num_bytes *= 2
    return _behind_zeros(words_NW[:, 0], 4)


def _behind_zeros(states: Tensor, num_bytes: int) -> Tensor:
    """What zero bytes make of states."""
    table = _zeros_table(num_bytes, states.device)
    result = torch.zeros_like(states)
    for place in range(4):
        bytes_of = ((states >> (8 * place)) & _BYTE).reshape(-1)
        result ^= table[place].index_select(0, bytes_of).reshape(states.shape)
    return result


@lru_cache(maxsize=256)
def _zeros_table(num_bytes: int, device: torch.device) -> Tensor:
    """int32 [4, 256]: what becomes of each byte of a state."""
    matrix = _zeros_matrix(num_bytes)
    table = [[_applied(matrix, byte << (8 * place)) for byte in range(256)] for place in range(4)]
    return torch.tensor(table, dtype=torch.int64).to(torch.int32).to(device)


@lru_cache(maxsize=256)
def _zeros_matrix(num_bytes: int) -> tuple[int, ...]:
    """What becomes of each of the 32 bits of a state behind zero bytes, by squaring."""
    if num_bytes == 0:
        return tuple(1 << bit for bit in range(32))
    if num_bytes == 1:
        return tuple(_behind_one(1 << bit) for bit in range(32))
    half = _zeros_matrix(num_bytes // 2)
    doubled = tuple(_applied(half, column) for column in half)
    return tuple(_behind_one(column) for column in doubled) if num_bytes % 2 else doubled


def _behind_one(state: int) -> int:
    for _ in range(8):
        state = (state >> 1) ^ (_POLYNOMIAL if state & 1 else 0)
    return state


def _applied(matrix: tuple[int, ...], state: int) -> int:
    result = 0
    for bit, column in enumerate(matrix):
        if state >> bit & 1:
            result ^= column
    return result
