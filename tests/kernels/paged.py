"""Paged KV caches for the tests: random rows, pages in any order, and NaN wherever nothing may be read."""

from typing import NamedTuple

import torch

ROPE = 32
LATENT = {"bf16": 128, "flat576": 128, "dsa656": 512}  # columns, the fewest that a layout is decoded with
SCALE = 0.0625  # of flat rows; exact, so that twins see the same values


class Paged(NamedTuple):
    """``pool`` [pages, page_size, ...] with NaN bytes in unread rows; ``page_table`` with -1 behind the last page."""

    pool: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor


def mla_rows(layout: str, num_rows: int, *, latent: int | None = None, rope: int = ROPE, seed: int = 0) -> torch.Tensor:
    """Rows as they lie in the cache, uint8 [rows, bytes]; scales of many sizes in dsa656."""
    latent = latent or LATENT[layout]
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((num_rows, latent + rope), generator=generator)
    if layout == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    if layout == "flat576":
        return (values / SCALE).to(torch.float8_e4m3fn).view(torch.uint8)
    tiles = values[:, :latent].reshape(num_rows, latent // 128, 128)
    tiles = tiles * torch.exp2(torch.randint(-6, 3, (num_rows, latent // 128, 1), generator=generator).float())
    scale = tiles.abs().amax(-1) / 448
    codes = (tiles / scale[..., None]).to(torch.float8_e4m3fn).reshape(num_rows, latent)
    parts = (codes, scale.contiguous(), values[:, latent:].to(torch.bfloat16).contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], 1)


def paginate(rows: list[torch.Tensor], page_size: int, device: str, *, seed: int = 0) -> Paged:
    """``rows``: of each sequence, [tokens, ...]. Pages of all sequences are shuffled, and one is left over."""
    lens = [len(one) for one in rows]
    counts = [-(-length // page_size) for length in lens]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(seed)).tolist()
    pool = torch.empty((len(order), page_size, *rows[0].shape[1:]), dtype=rows[0].dtype)
    pool.view(torch.uint8).fill_(0xFF)  # NaN in every float format
    page_table = torch.full((len(rows), max(counts) + 2), -1, dtype=torch.int32)
    for index, one in enumerate(rows):
        for number in range(counts[index]):
            page = order.pop()
            part = one[number * page_size : (number + 1) * page_size]
            pool[page, : len(part)] = part
            page_table[index, number] = page
    return Paged(pool.to(device), page_table.to(device), torch.tensor(lens, dtype=torch.int32, device=device))


def queries(num_seqs: int, num_heads: int, width: int, device: str, *, seed: int = 1) -> torch.Tensor:
    """BF16, heads of very different sizes."""
    q = torch.randn((num_seqs, num_heads, width), generator=torch.Generator().manual_seed(seed))
    return (q * torch.exp2(torch.arange(num_heads) % 5 - 2.0)[:, None]).to(torch.bfloat16).to(device)
