"""What a guard is told when it is attached to a pool."""

from dataclasses import dataclass, field
from pathlib import Path

from quantkit.kv_guard.identity import PoolIdentity
from quantkit.kv_guard.tracker import KvGuardError, Mode

# of a tracker's arrays (kv_tag_arrays.py, page_arrays.py)
_BYTES_A_PAGE = 57  # tag, state, and what is known of grants and transfers
_BYTES_A_PLACE = 36  # a row's logical page: what it expects, and what a launched step captures
_BYTES_A_ROW = 16  # openings, expected and captured


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """Of a pool and of the batches that read it. ``null_page``: the page that an engine names for none, else -1."""

    num_pages: int
    page_size: int
    num_rows: int
    most_pages: int  # of one row
    null_page: int = -1

    @property
    def num_bytes(self) -> int:
        """Of the arrays that a tracker makes, but for its ring."""
        places = self.num_rows * self.most_pages * _BYTES_A_PLACE
        return self.num_pages * _BYTES_A_PAGE + places + self.num_rows * _BYTES_A_ROW


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """``ring_lines``: violations of one step that are kept whole; more are counted. Generations have 64 bits, and 0
    means that nothing was granted. Two pools with one ``secret`` know each other's owners; None is one that no other
    pool has, and that is written nowhere."""

    identity: PoolIdentity
    size: PoolSize
    mode: Mode = Mode.LOG
    ring_lines: int = 256
    incidents: Path | None = None
    secret: bytes | None = field(default=None, repr=False)
    first_generation: int | None = None  # None: a random one, so that two runs of one pool share none

    def check(self) -> None:
        """Raise KvGuardError for sizes that no pool has, and for generations that nothing is granted under."""
        size = self.size
        for name in ("num_pages", "page_size", "num_rows", "most_pages"):
            if getattr(size, name) < 1:
                raise KvGuardError(f"a pool with {name} {getattr(size, name)}", remedy="attach when the pool exists")
        if self.ring_lines < 1:
            raise KvGuardError(f"a ring of {self.ring_lines} lines", remedy="give it one at least")
        first = self.first_generation
        if first is not None and not 0 < first < 1 << 64:
            raise KvGuardError(f"a first generation of {first}", remedy="begin with 1 at least, or leave it to chance")
