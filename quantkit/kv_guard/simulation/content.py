"""What pages really hold, so that the simulator knows without tags whether a step read what it should.

A word stands for the KV of a token in a layer: it is made of the token and all before it, as real KV is.

Legend: L layers, P pages, S tokens of a page, T tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.kv_guard.checksums import PageChecksums
from quantkit.kv_guard.dispatch import twins

NUM_LAYERS = 2
REFUSED = 0x0BAD_0D0A_F700_0001  # what a refused draft differs by
DAMAGED = 0x0BAD_0C0D_E000_0001  # what a token differs by whose attention read something wrong
_SALTS = (0x1F83_D9AB_FB41_BD6B, 0x5BE0_CD19_137E_2179)
_STEP = 0x1000_0000_01B3


def words_of(tokens: Sequence[int], length: int) -> Tensor:
    """int64 [length]: of each token, with zeros behind the last."""
    ids = torch.tensor(tokens, dtype=torch.int64)
    mixed = twins.mix(ids * _STEP + torch.arange(len(ids)))
    return torch.nn.functional.pad(twins.mix(mixed.cumsum(0)), (0, length - len(ids)))


def in_layer(words: Tensor, layer: int) -> Tensor:
    """The same tokens' words in a layer."""
    return words ^ _SALTS[layer]


class Content:
    """Of one pool. What was never written is noise."""

    def __init__(self, num_pages: int, page_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_LAYERS, num_pages, page_size)
        self.page_size = page_size
        self.words_LPS = torch.randint(-(1 << 62), 1 << 62, shape, generator=generator)
        self.checksums = PageChecksums([self.words_LPS[layer] for layer in range(NUM_LAYERS)])

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Within the pool, in all layers."""
        self.words_LPS[:, targets] = self.words_LPS[:, sources]

    def take(self, other: "Content", layer: int, sources: Tensor, targets: Tensor) -> None:
        """One layer of pages of another pool."""
        self.words_LPS[layer, targets] = other.words_LPS[layer, sources]

    def holds(self, pages: Tensor, words_T: Tensor) -> Tensor:
        """Which pages have the words of these tokens, the first of which stands in the first page: bool [N]."""
        num_tokens, size = len(words_T), self.words_LPS.shape[2]
        is_filled = torch.arange(len(pages) * size) < num_tokens
        padded_T = torch.nn.functional.pad(words_T, (0, len(is_filled) - num_tokens))
        is_right = torch.ones(len(pages), dtype=torch.bool)
        for layer in range(NUM_LAYERS):
            words = self.words_LPS[layer, pages].reshape(-1)
            is_right &= ((words == in_layer(padded_T, layer)) | ~is_filled).reshape(-1, size).all(1)
        return is_right

    def flip(self, page: int, bit: int) -> None:
        """One bit of a page turns over."""
        words = self.words_LPS[bit % NUM_LAYERS, page]
        place = bit // NUM_LAYERS % (len(words) * 63)
        words[place // 63] ^= 1 << place % 63
