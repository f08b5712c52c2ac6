"""Decode attention over a paged KV cache in plain torch and float64: what the kernels are compared with.

Nothing is rounded but what lies in the cache. Signatures are those of the kernels, without ``num_splits``.
"""

import math

import torch

from quantkit_kernels.reference.kv_cache import TILE


def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    layout: str,
    scale: float = 1.0,
    rope_dim: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` float64 [B, H, latent] and ``lse`` float64 [B, H]."""
    num_seqs, num_heads, width = q.shape
    latent_dim = width - rope_dim
    out = torch.zeros((num_seqs, num_heads, latent_dim), dtype=torch.float64, device=q.device)
    lse = torch.full((num_seqs, num_heads), -math.inf, dtype=torch.float64, device=q.device)
    for index, num_tokens in enumerate(seq_lens.tolist()):
        if num_tokens > 0:
            rows = _rows(cache, page_table[index], num_tokens)
            keys = mla_rows(rows, layout=layout, scale=scale, latent_dim=latent_dim)
            scores = q[index].double() @ keys.T * softmax_scale
            lse[index] = scores.logsumexp(-1)
            out[index] = scores.softmax(-1) @ keys[:, :latent_dim]
    return out, lse


def gqa_decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` float64 [B, H, D] and ``lse`` float64 [B, H]; heads of a group share a head of the cache."""
    num_seqs, num_heads, width = q.shape
    num_kv_heads = key_cache.shape[2]
    out = torch.zeros((num_seqs, num_heads, width), dtype=torch.float64, device=q.device)
    lse = torch.full((num_seqs, num_heads), -math.inf, dtype=torch.float64, device=q.device)
    for index, num_tokens in enumerate(seq_lens.tolist()):
        if num_tokens > 0:
            keys, values = (
                _e4m3_or_bf16(_rows(cache, page_table[index], num_tokens))
                .double()
                .repeat_interleave(num_heads // num_kv_heads, 1)
                for cache in (key_cache, value_cache)
            )
            scores = torch.einsum("hd,thd->ht", q[index].double(), keys * key_scale) * softmax_scale
            lse[index] = scores.logsumexp(-1)
            out[index] = torch.einsum("ht,thd->hd", scores.softmax(-1), values * value_scale)
    return out, lse


def _e4m3_or_bf16(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.float8_e4m3fn) if rows.dtype == torch.uint8 else rows


def mla_rows(rows: torch.Tensor, *, layout: str, scale: float, latent_dim: int) -> torch.Tensor:
    """Rows of the cache, uint8 [T, bytes], as float64 [T, latent + rope]."""
    if layout == "bf16":
        return rows.contiguous().view(torch.bfloat16).double()
    codes = rows[:, :latent_dim].contiguous().view(torch.float8_e4m3fn).double()
    if layout == "flat576":
        return torch.cat([codes, rows[:, latent_dim:].contiguous().view(torch.float8_e4m3fn).double()], 1) * scale
    rope = latent_dim + latent_dim // TILE * 4
    tile_scale = rows[:, latent_dim:rope].contiguous().view(torch.float32).double()
    latent = codes * tile_scale.repeat_interleave(TILE, 1)
    return torch.cat([latent, rows[:, rope:].contiguous().view(torch.bfloat16).double()], 1)


def _rows(cache: torch.Tensor, pages: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The rows of a sequence, in order; page numbers behind its end are not looked at."""
    page_size = cache.shape[1]
    token = torch.arange(num_tokens, device=cache.device)
    return cache[pages.long()[token // page_size], token % page_size]
