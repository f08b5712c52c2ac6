"""INT4 words of a checkpoint to the kernels' own order, and back: the same codes, bit for bit.

A tile is 128 columns: 16 words a row. A tensor core's thread ``t`` of a quad holds, of 8 columns, the two from 2t on.
So the word at ``4 * t + p`` of a tile has the columns ``32 * p + 8 * i + 2 * t + b``, for i < 4 and b < 2, at bit
``4 * i + 16 * b``: what a thread loads, 16 bytes at once, is what it multiplies; one mask gives two neighbours as the
two halves of a register; and all codes of a word share a group. Tiles of all rows lie one after the other.

Suffixes: ``R`` rows (out), ``C`` columns (in), ``G`` groups, ``W`` words, ``K`` tiles of 128 columns.
"""

from typing import NamedTuple

import torch

from quantkit_kernels.checks import seen

GROUP_SIZES = (32, 64, 128)
TILE_COLS = 128
TILE_WORDS = TILE_COLS // 8
_ZERO_WORD = -0x77777778  # eight codes of zero, 0x88888888


class Int4Weight(NamedTuple):
    """Words int32 and scales BF16 of a weight, or of experts.

    As stored ``words`` [..., R, C / 8], ``scale`` [..., R, G]; repacked [..., K, R, 16] and [..., K, R, 128 / group],
    where missing columns are zeros.
    """

    words: torch.Tensor
    scale: torch.Tensor


def repack(weight_packed: torch.Tensor, weight_scale: torch.Tensor, *, group_size: int) -> Int4Weight:
    """``weight_packed`` int32 [..., R, C / 8] and ``weight_scale`` BF16 [..., R, G], as compressed-tensors stores them.

    Leading dimensions (experts) stay. Raises ValueError for shapes and dtypes that do not go together.
    """
    check_weight(
        Int4Weight(weight_packed, weight_scale),
        num_cols=weight_packed.shape[-1] * 8 if weight_packed.ndim else 0,
        group_size=group_size,
        experts=tuple(weight_packed.shape[:-2]),
    )
    *experts, num_rows, num_words = weight_packed.shape
    missing = -num_words % TILE_WORDS
    words = torch.nn.functional.pad(weight_packed, (0, missing), value=_ZERO_WORD)
    scale = torch.nn.functional.pad(weight_scale, (0, missing * 8 // group_size))
    num_tiles = words.shape[-1] // TILE_WORDS
    # columns of a tile are 32 * p + 8 * i + 2 * t + b, in this order; four words of the checkpoint are 32 columns
    source = words.reshape(*experts, num_rows, num_tiles, 4, 4, 1, 1)
    shift = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device).reshape(4, 2)
    codes = (source >> shift) & 15  # [..., R, K, p, i, t, b]
    places = torch.arange(0, 16, 4, dtype=torch.int32, device=words.device).reshape(4, 1, 1)
    places = places + torch.tensor([0, 16], dtype=torch.int32, device=words.device)
    tiles = (codes << places).sum((-3, -1), dtype=torch.int32)  # [..., R, K, p, t]
    tiles = tiles.movedim(-4, -3).transpose(-1, -2).reshape(*experts, num_tiles, num_rows, TILE_WORDS)
    scale = scale.reshape(*experts, num_rows, num_tiles, TILE_COLS // group_size).movedim(-3, -2)
    return Int4Weight(tiles.contiguous(), scale.contiguous())


def unrepack(tiles: Int4Weight, *, num_cols: int, group_size: int) -> Int4Weight:
    """The checkpoint's ``weight_packed`` and ``weight_scale`` of ``num_cols`` columns: the inverse of ``repack``.

    Raises ValueError for other shapes and dtypes than it gives for as many columns, and for none.
    """
    if tiles.words.ndim < 3 or num_cols < 1:
        raise ValueError(f"words {tuple(tiles.words.shape)} of {num_cols} columns are not repacked [..., K, R, 16]")
    leading = tuple(tiles.words.shape[:-3])
    check_weight(tiles, num_cols=num_cols, group_size=group_size, experts=leading, name="a repacked weight")
    *experts, num_tiles, num_rows, _ = tiles.words.shape
    words = tiles.words.reshape(*experts, num_tiles, num_rows, 1, 4, 1, 4).movedim(-5, -6)  # [..., R, K, 1, t, 1, p]
    places = torch.arange(0, 16, 4, dtype=torch.int32, device=words.device).reshape(4, 1, 1, 1)
    places = places + torch.tensor([0, 16], dtype=torch.int32, device=words.device).reshape(2, 1)
    codes = (words >> places) & 15  # [..., R, K, i, t, b, p]
    shift = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device).reshape(4, 2, 1)
    packed = (codes << shift).sum((-3, -2), dtype=torch.int32)  # [..., R, K, i, p]
    packed = packed.transpose(-1, -2).reshape(*experts, num_rows, num_tiles * TILE_WORDS)
    scale = tiles.scale.movedim(-2, -3).reshape(*experts, num_rows, num_tiles * (TILE_COLS // group_size))
    return Int4Weight(packed[..., : num_cols // 8].contiguous(), scale[..., : num_cols // group_size].contiguous())


def check_weight(
    weight: Int4Weight,
    *,
    num_cols: int,
    group_size: int,
    num_rows: int | None = None,
    experts: tuple[int, ...] = (),
    name: str = "a weight",
) -> int:
    """The number of rows of words and scales, as stored or repacked; ``experts``: the leading dimensions.

    Raises ValueError unless they are those of ``num_cols`` columns, and of ``num_rows`` rows where it is given.
    """
    words, scale = weight
    check_dtypes(words, scale, group_size=group_size)
    if words.ndim - len(experts) not in (2, 3):
        raise ValueError(f"{name} has words {tuple(words.shape)}, neither as stored nor repacked")
    rows = words.shape[-2] if num_rows is None else num_rows
    if num_cols % group_size:
        raise ValueError(f"{name} of {num_cols} columns has no whole groups of {group_size}")
    if words.ndim - len(experts) == 3:
        shape = (*experts, -(-num_cols // TILE_COLS), rows)
        wanted = (*shape, TILE_WORDS), (*shape, TILE_COLS // group_size)
    else:
        wanted = (*experts, rows, num_cols // 8), (*experts, rows, num_cols // group_size)
    if (tuple(words.shape), tuple(scale.shape)) != wanted:
        raise ValueError(
            f"{name} {(*experts, rows, num_cols)} in groups of {group_size} has words {wanted[0]} and scales "
            f"{wanted[1]}, not {tuple(words.shape)} and {tuple(scale.shape)}"
        )
    return rows


def check_contiguous(weight: Int4Weight, *, name: str = "a weight") -> None:
    """Raise ValueError for words or scales that every call would have to copy."""
    for part, tensor in zip(("words", "scales"), weight, strict=True):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} is not contiguous, and would be copied at every call: its {part} are {seen(tensor)}"
            )


def check_group_size(group_size: int) -> None:
    """Raise ValueError for groups that no kernel has."""
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size is {group_size}, not one of {', '.join(map(str, GROUP_SIZES))}")


def check_dtypes(words: torch.Tensor, scale: torch.Tensor, *, group_size: int) -> None:
    """Raise ValueError for words or scales of another dtype, and for an unknown group size; in either order."""
    check_group_size(group_size)
    if words.dtype != torch.int32 or scale.dtype != torch.bfloat16:
        raise ValueError(f"words are int32 and scales BF16, not {words.dtype} and {scale.dtype}")
