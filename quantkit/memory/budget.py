"""What a rank has for weights, pool and overhead, as one engine divides it.

Overhead is no formula: it is a band with its source.
"""

from dataclasses import dataclass

GIB = 2**30  # bytes
MIB_PER_GIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Least, expected, most GiB; which end is bad depends on what it is."""

    low: float
    mid: float
    high: float

    def __add__(self, other: "Band") -> "Band":
        return Band(low=self.low + other.low, mid=self.mid + other.mid, high=self.high + other.high)

    def rest_of(self, gib: float) -> "Band":
        """What this leaves of ``gib``; the least of the rest is that of the worst."""
        return Band(low=gib - self.high, mid=gib - self.mid, high=gib - self.low)


def exactly(gib: float) -> Band:
    """A band without width."""
    return Band(low=gib, mid=gib, high=gib)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one rank has. ``pool`` may be negative: then the weights alone are too much.

    ``overhead``: activations, graphs, tables. ``limit_gib``: what weights and pool may take together; ``whole_gib``:
    what ``fraction`` is a share of, and ``largest_fraction`` what it may be; ``scales_fraction``: the engine makes less
    of one that it is given. ``spare_gib``: what the engine leaves for
    overhead beside the pool, where it reserves. ``overhead_source`` says where the band comes from.
    """

    fraction: float
    is_default: bool
    rule: str
    pool: Band
    overhead: Band
    overhead_source: str
    limit_gib: float
    whole_gib: float
    largest_fraction: float
    scales_fraction: bool
    spare_gib: float | None
