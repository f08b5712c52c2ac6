"""Whose pages they are: a key for each pool, and digests of prefix chains under it.

The key binds what must agree before a page of one pool may be read as a page of another: the model, the layout of its
cache, the pool's role and this format of tags; and a secret, since those four stand in incidents and dumps: whoever has
such a file could else try prompts until an owner agrees. Both sides of a transfer name the same five.
"""

import hashlib
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

TAG_VERSION = 1
KEY_BYTES = 32
OWNER_BYTES = 8

Chain = NewType("Chain", bytes)
"""Digest of all tokens up to a page's end, of 32 bytes. An owner is eight of them: were the chain no longer than that,
two prompts of a thousand pages would have a thousand chances to meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolIdentity:
    """What a pool holds. ``model`` is a fingerprint, ``layout`` names cell, dtype and page size, ``pool`` the role."""

    model: str
    layout: str
    pool: str = "target"

    def key(self, secret: bytes | None) -> bytes:
        """32 bytes; each part with its length, so that no two splits of one text agree; None is nobody's secret."""
        digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"quantkit-kv-tag")
        parts = [part.encode() for part in (str(TAG_VERSION), self.model, self.layout, self.pool)]
        for part in (*parts, secrets.token_bytes(KEY_BYTES) if secret is None else secret):
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.digest()


@dataclass(frozen=True, slots=True)
class Chains:
    """Digests under a pool's key. What makes the same tokens another content (adapter, image, tenant) is the salt."""

    key: bytes

    def start(self, salt: bytes = b"") -> Chain:
        """Of no token."""
        return self._digest(b"start", salt)

    def behind(self, chain: Chain, tokens: Sequence[int]) -> Chain:
        """Of a whole page of ``tokens`` (ids below 2^63) that follows those of ``chain``: equal for all its readers."""
        return self._digest(b"page", chain, struct.pack(f"<{len(tokens)}Q", *tokens))

    def of_hash(self, engine_hash: bytes) -> Chain:
        """Of a page whose chain an engine hashed already; not that of `behind`, and equal where its hashes are."""
        return self._digest(b"hash", engine_hash)

    def branch(self, chain: Chain, request: str, index: int) -> Chain:
        """Of logical page ``index`` that is granted before its tokens are known: one request's alone."""
        return self._digest(b"branch", chain, index.to_bytes(8, "little"), request.encode())

    def of_prompt(self, tokens: Sequence[int], page_size: int, request: str, salt: bytes = b"") -> list[Chain]:
        """Of every page that ``tokens`` reach into; one that they do not fill is the request's own.

        The tokens before a page would not do: the first pages of all prompts have none, and a transfer that brought
        another request's would pass.
        """
        chains, chain = [], self.start(salt)
        for first in range(0, len(tokens), page_size):
            some = tokens[first : first + page_size]
            is_whole = len(some) == page_size
            chain = self.behind(chain, some) if is_whole else self.branch(chain, request, first // page_size)
            chains.append(chain)
        return chains

    def _digest(self, kind: bytes, *parts: bytes) -> Chain:
        digest = hashlib.blake2b(key=self.key, digest_size=KEY_BYTES, person=kind)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return Chain(digest.digest())


def owner_of(chain: Chain) -> int:
    """As a tag holds it: int64, as bits."""
    return int.from_bytes(chain[:OWNER_BYTES], "little", signed=True)
