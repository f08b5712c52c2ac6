"""Whose tokens a page holds: digests of prefixes, as the pages of a request need them.

A prefix of the cache is its tokens under two names (adapter or cache version, and tenant), and, where a draft model is
trained on pairs of tokens, the token behind its last one.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from quantkit.kv_guard.identity import Chain, Chains, owner_of


def salt_of(extra_key: str | None, cache_salt: str | None) -> bytes:
    """What sets prefixes of equal tokens apart; empty where nothing does."""
    return b"" if not (extra_key or cache_salt) else repr((extra_key, cache_salt or None)).encode()


@dataclass(slots=True)
class Prefixes:
    """Of one request: digests of its whole pages, made once, as far as they were asked for."""

    chains: Chains
    page_size: int
    request: str  # names the pages that it has for itself
    salt: bytes
    _known: list[Chain] = field(default_factory=list)

    def of(self, tokens: Sequence[int], num_pages: int) -> list[Chain]:
        """The first ``num_pages`` pages, all of them whole. A request's tokens only ever grow."""
        chain = self._known[-1] if self._known else self.chains.start(self.salt)
        for first in range(len(self._known) * self.page_size, num_pages * self.page_size, self.page_size):
            chain = self.chains.behind(chain, tokens[first : first + self.page_size])
            self._known.append(chain)
        return self._known[:num_pages]

    def owners(self, tokens: Sequence[int], first: int, last: int) -> list[int]:
        """Of pages ``first`` to ``last`` (left out): of their tokens where they are known, else of the request."""
        known = self.of(tokens, min(last, len(tokens) // self.page_size))
        before = known[-1] if known else self.chains.start(self.salt)
        own = range(max(first, len(known)), last)
        return [owner_of(chain) for chain in known[first:]] + [
            owner_of(self.chains.branch(before, self.request, index)) for index in own
        ]

    def keys(self, tokens: Sequence[int], first: int, last: int, *, in_pairs: bool) -> list[bytes]:
        """Under which pages ``first`` to ``last`` (left out) are kept; ``in_pairs`` takes one token more."""
        known = self.of(tokens, last)[first:]
        if not in_pairs:
            return [bytes(chain) for chain in known]
        behind = (tokens[(index + 1) * self.page_size] for index in range(first, last))
        return [chain + struct.pack("<Q", token) for chain, token in zip(known, behind, strict=True)]
