"""What fp8_kv.py must store and read, in plain torch.

Suffixes: ``T`` tokens, ``L`` latent columns, ``C`` columns, ``G`` tiles of 128 columns, ``H`` heads, ``D`` columns of a
head, ``S`` slots, ``P`` pages, ``B`` bytes. Arguments are those of fp8_kv.py, which checks them, as nothing here does.
"""

import torch
from torch import Tensor

TILE = 128
E4M3_MAX = 448.0
TINY = 2.0**-128
"""Scales up to here have no finite reciprocal: such a tile is stored as zeros."""
FLOORS = {("row", "sglang"): (0.0, 0.0), ("row", "vllm"): (0.0, 1e-4)}
FLOORS |= {("index", "sglang"): (1e-4, 0.0), ("index", "vllm"): (1e-4, 0.0)}
"""Of the largest magnitude of a tile, and of its scale."""


def encode_e4m3(values: Tensor) -> Tensor:
    """Nearest codes of float32 values, ties to even, saturating at 448; every NaN is 0x7F."""
    codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(torch.isnan(values), 0x7F, codes)


def decode_e4m3(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def _divide(values: Tensor, scale: Tensor | float) -> Tensor:
    """The IEEE quotient in float32. By a number torch would multiply by its reciprocal on a GPU, by a tensor not."""
    return values / torch.as_tensor(scale, dtype=torch.float32, device=values.device)


def tile_codes(values_TC: Tensor, *, row: str, scale_rule: str) -> tuple[Tensor, Tensor]:
    """Codes [T, C] and float32 scales [T, G]. Infinity makes its tile NaN."""
    amax_floor, scale_floor = FLOORS[row, scale_rule]
    tiles_TGC = values_TC.float().reshape(len(values_TC), -1, TILE)
    amax_TG = torch.where(torch.isnan(tiles_TGC), 0.0, tiles_TGC.abs()).amax(-1).clamp_min(amax_floor)
    scale_TG = _divide(amax_TG, E4M3_MAX).clamp_min(scale_floor)
    if scale_rule == "vllm":
        # the next power of two: a fraction of one half has been one, and infinity has none
        fraction_TG = torch.frexp(scale_TG).mantissa
        is_power_TG = (fraction_TG == 0.5) | torch.isinf(scale_TG)
        scale_TG = torch.where(is_power_TG, scale_TG, _divide(scale_TG, fraction_TG))
    inverse_TG = torch.where(scale_TG > TINY, _divide(torch.ones_like(scale_TG), scale_TG), 0.0)
    return encode_e4m3(tiles_TGC * inverse_TG[..., None]).reshape(values_TC.shape), scale_TG


def _bytes(values_TC: Tensor) -> Tensor:
    return values_TC.contiguous().view(torch.uint8)


def _bf16(values_TC: Tensor) -> Tensor:
    """BF16 as it is; FP16 rounded, ties to even, every NaN 0x7FC0."""
    if values_TC.dtype == torch.bfloat16:
        return values_TC
    return _narrow(values_TC.float(), torch.bfloat16)


def _narrow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 values in ``dtype``, with that dtype's positive quiet NaN."""
    nan = torch.full((), float("nan"), dtype=dtype, device=values.device)
    return torch.where(torch.isnan(values), nan, values.to(dtype))


def _store(rows_SB: Tensor, slots: Tensor, bytes_TB: Tensor) -> None:
    """Slots that are not in the cache are skipped."""
    is_stored = (slots >= 0) & (slots < len(rows_SB))
    rows_SB[slots[is_stored].long()] = bytes_TB[is_stored]


def _load(rows_SB: Tensor, slots: Tensor) -> Tensor:
    """Slots that are not in the cache are read as zeros."""
    is_stored = (slots >= 0) & (slots < len(rows_SB))
    found_TB = torch.zeros((len(slots), rows_SB.shape[-1]), dtype=torch.uint8, device=rows_SB.device)
    found_TB[is_stored] = rows_SB[slots[is_stored].long()]
    return found_TB


def quantize_kv_mla(
    latent: Tensor,
    rope: Tensor,
    slots: Tensor,
    cache: Tensor,
    *,
    layout: str,
    scale: float = 1.0,
    scale_rule: str = "sglang",
) -> None:
    rows_SB = cache.view(-1, cache.shape[-1])
    if layout == "flat576":
        parts = [encode_e4m3(_divide(part.float(), scale)) for part in (latent, rope)]
    elif layout == "dsa656":
        codes_TL, scale_TG = tile_codes(latent, row="row", scale_rule=scale_rule)
        parts = [codes_TL, _bytes(scale_TG), _bytes(_bf16(rope))]
    else:
        parts = [_bytes(_bf16(latent)), _bytes(_bf16(rope))]
    _store(rows_SB, slots, torch.cat(parts, 1))


def dequantize_kv_mla(
    cache: Tensor,
    slots: Tensor,
    *,
    layout: str,
    scale: float = 1.0,
    latent_dim: int = 512,
    rope_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    found_TB = _load(cache.view(-1, cache.shape[-1]), slots)
    if layout == "flat576":
        latent, rope = (decode_e4m3(part) * scale for part in torch.split(found_TB, [latent_dim, rope_dim], 1))
        return _narrow(latent, dtype), _narrow(rope, dtype)
    if layout == "dsa656":
        codes_TL, scale_TB, rope_TB = torch.split(found_TB, [latent_dim, latent_dim // TILE * 4, rope_dim * 2], 1)
        scale_TG = scale_TB.contiguous().view(torch.float32)
        tiles_TGC = decode_e4m3(codes_TL).reshape(len(slots), -1, TILE) * scale_TG[..., None]
        latent = _narrow(tiles_TGC.reshape(len(slots), latent_dim), dtype)
    else:
        latent_TB, rope_TB = torch.split(found_TB, [latent_dim * 2, rope_dim * 2], 1)
        latent = _widen(latent_TB, dtype)
    return latent, _widen(rope_TB, dtype)


def _widen(bf16_TB: Tensor, dtype: torch.dtype) -> Tensor:
    values_TC = bf16_TB.contiguous().view(torch.bfloat16)
    return values_TC if dtype == torch.bfloat16 else _narrow(values_TC.float(), dtype)


def quantize_kv(
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    for source_THD, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        codes_TC = encode_e4m3(_divide(source_THD.float(), scale)).flatten(1)
        _store(cache.view(torch.uint8).view(-1, codes_TC.shape[1]), slots, codes_TC)


def dequantize_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    key, value = (
        _narrow(
            decode_e4m3(_load(cache.view(torch.uint8).view(-1, cache.shape[-2] * cache.shape[-1]), slots)) * scale,
            dtype,
        ).view(len(slots), *cache.shape[-2:])
        for cache, scale in ((key_cache, key_scale), (value_cache, value_scale))
    )
    return key, value


def _index_views(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Of a page of 132 bytes a slot: all keys, [P, slots, 128], and behind them all scales, [P, slots, 4]."""
    num_pages, page_slots, _row = cache.shape
    page_PB = cache.view(num_pages, -1)
    keys_PB, scales_PB = page_PB[:, : page_slots * TILE], page_PB[:, page_slots * TILE :]
    return keys_PB.view(num_pages, page_slots, TILE), scales_PB.view(num_pages, page_slots, 4)


def quantize_index_keys(keys: Tensor, slots: Tensor, cache: Tensor, *, scale_rule: str = "sglang") -> None:
    codes_TC, scale_TG = tile_codes(keys, row="index", scale_rule=scale_rule)
    num_pages, page_slots, _row = cache.shape
    is_stored = (slots >= 0) & (slots < num_pages * page_slots)
    page, within = slots[is_stored].long() // page_slots, slots[is_stored].long() % page_slots
    key_view, scale_view = _index_views(cache)
    key_view[page, within] = codes_TC[is_stored]
    scale_view[page, within] = _bytes(scale_TG)[is_stored]


def dequantize_index_keys(cache: Tensor, slots: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    key_view, scale_view = _index_views(cache)
    codes_TC = _load(key_view.reshape(-1, TILE), slots)
    scale_T1 = _load(scale_view.reshape(-1, 4), slots).view(torch.float32)
    return _narrow(decode_e4m3(codes_TC) * scale_T1, dtype)
