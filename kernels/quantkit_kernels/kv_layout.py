"""The rows of an MLA cache, once for what stores, what reads and what attends: where each part of a row lies.

| layout | parts, from the first byte on |
|---|---|
| ``bf16`` | latent and rope in BF16 |
| ``flat576`` | latent and rope in E4M3, divided by one scale that is not in the row |
| ``dsa656`` | latent in E4M3, a float32 scale for each 128 of its columns, rope in BF16 |

The numbers in the names are the bytes of a row of 512 latent and 64 rope columns.
"""

import struct
from numbers import Real
from typing import Literal, NamedTuple

Layout = Literal["bf16", "flat576", "dsa656"]
LAYOUTS: tuple[Layout, ...] = ("bf16", "flat576", "dsa656")
SCALE_COLS = 128  # columns that share a scale, in dsa656 and in index keys


class RowParts(NamedTuple):
    """Bytes from the begin of a row: of its scales (none where ``rope`` is the same), of its rope, and of its end."""

    scales: int
    rope: int
    end: int


def row_parts(layout: Layout, latent_dim: int, rope_dim: int) -> RowParts:
    """Raises ValueError for an unknown layout and for widths that it cannot hold."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, not one of {', '.join(LAYOUTS)}")
    if latent_dim < SCALE_COLS or latent_dim % SCALE_COLS:
        raise ValueError(f"the latent has {latent_dim} columns, no multiple of {SCALE_COLS}")
    if rope_dim < 16 or rope_dim % 16:
        raise ValueError(f"the rope has {rope_dim} columns, no multiple of 16")
    latent_bytes = latent_dim * 2 if layout == "bf16" else latent_dim
    scale_bytes = latent_dim // SCALE_COLS * 4 if layout == "dsa656" else 0
    rope_bytes = rope_dim if layout == "flat576" else rope_dim * 2
    rope = latent_bytes + scale_bytes
    return RowParts(latent_bytes, rope, rope + rope_bytes)


def row_bytes(layout: Layout, latent_dim: int = 512, rope_dim: int = 64) -> int:
    """Bytes of a row."""
    return row_parts(layout, latent_dim, rope_dim).end


def check_scale(name: str, scale: float) -> float:
    """The float32 of a scale whose reciprocal is a normal number too. Raises ValueError for any other."""
    if not isinstance(scale, Real):
        raise ValueError(f"{name} is a number, not a {type(scale).__name__}: give scale.item()")
    if not 2.0**-126 <= scale <= 2.0**126:
        raise ValueError(f"{name} is {scale}, not between 2**-126 and 2**126")
    (single,) = struct.unpack("f", struct.pack("f", scale))
    return float(single)


def check_row_scale(layout: Layout, scale: float) -> None:
    """Raise ValueError for what is no scale, and for one beside rows that have none."""
    check_scale("scale", scale)
    if layout != "flat576" and scale != 1.0:
        raise ValueError(f"{layout} rows have no scale beside them, and scale is {scale}")
