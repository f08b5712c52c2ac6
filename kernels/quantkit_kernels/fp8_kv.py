"""Rows of a KV cache: quantized and stored by one launch, and read back. reference/kv_cache.py holds the twins.

| layout | bytes a row | what they are |
|---|---|---|
| flat576 | 512 + 64 | E4M3 of latent and rope, divided by one scale |
| dsa656 | 512 + 4 x 4 + 64 x 2 | E4M3 of the latent, a float32 scale for each 128 columns, BF16 rope |
| bf16 | 2 x (512 + 64) | BF16 |

Scale rules of a tile, with amax its largest magnitude, for 16-bit inputs; codes are of value / scale:

- ``sglang`` (0.5.23): amax / 448, no floor, and values are multiplied by the rounded reciprocal. Index keys: amax is at
  least 1e-4. The engine's ``/`` is good to 2 units in the last place on a GPU and ours is exact; for a tile of zeros it
  stores codes of -448 and we zeros, with a scale of 0 both; it turns NaN into -448, and we keep it.
- ``vllm`` (0.33.0): the next power of two at or above max(amax / 448, 1e-4). Index keys: above max(amax, 1e-4) / 448.
  Its fused kernel quantizes latents before they are rounded to BF16: it has the same rule, and other values.

Dividing by a scale is the IEEE division, as in vLLM; by a power of two it is a multiplication, which is the same.
Codes saturate at 448, NaN is 0x7F. Infinity makes a tile's scale infinite, and the tile is read as NaN.

Traffic of a token: 1152 bytes read, 576, 656 or 1152 written, 4 or 8 for each use of its slot; readers the other way
round. Compiled for sm_90 a thread has 8 columns, reads 16 bytes at once and writes 8, in 28 registers. An H200's SM has
some 18 bytes and 128 operations a cycle, so 21 operations an element are free: codes take about 22, an IEEE division 10
more. Up to some hundred tokens the time is that of one launch.

A slot that is not in the cache (negative: padding) is not stored, and read as zeros. Slots must differ: of two equal
ones a part of either may stay. Inputs may be slices of wider rows. The cache may have any number of dimensions before
its rows, [slots] or [pages, page size], but no gaps.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from quantkit_kernels.fp8_kv_jit import store_index_kernel, store_kv_kernel, store_mla_kernel
from quantkit_kernels.fp8_kv_read_jit import read_index_kernel, read_kv_kernel, read_mla_kernel
from quantkit_kernels.fp8_kv_rows import (
    KERNEL_LAYOUTS,
    ScaleRule,
    as_bytes,
    check_input,
    check_rule,
    check_same_slots,
    check_slots,
    empty_output,
    factor_of,
    index_rows,
    mla_rows,
    rows_of,
)
from quantkit_kernels.kv_layout import SCALE_COLS, Layout, check_row_scale, check_scale, row_bytes
from quantkit_kernels.launch import check_runs, launches

FLOOR = 1e-4
BLOCK_T = 8  # tokens of a program: 8 columns of 128 a thread, 16 bytes read and 8 written
OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}


def _words(rows: Tensor, layout: Layout) -> Sequence[Tensor]:
    """The rows in 8, 16 and 32 bits; bytes alone have no alignment."""
    if layout == "flat576":
        return rows, rows, rows
    return rows, rows.view(torch.bfloat16), rows.view(torch.float32)


@launches
def quantize_kv_mla(
    latent: Tensor,
    rope: Tensor,
    slots: Tensor,
    cache: Tensor,
    *,
    layout: Layout,
    scale: float = 1.0,
    scale_rule: ScaleRule = "sglang",
) -> None:
    """Store ``latent`` [T, L] and ``rope`` [T, R], BF16 or FP16, in rows ``slots`` [T] of ``cache`` uint8 [..., bytes].

    ``scale`` is for flat576 alone, ``scale_rule`` for dsa656. Raises ValueError for what does not go together.
    """
    check_slots(slots)
    check_rule(scale_rule)
    for name, part in (("latent", latent), ("rope", rope)):
        check_input(name, part, 2, slots)
    latent_dim, rope_dim = latent.shape[1], rope.shape[1]
    rows = mla_rows(cache, row_bytes(layout, latent_dim, rope_dim), slots)
    check_row_scale(layout, scale)
    factor, is_power = factor_of("scale", scale)
    if len(slots):
        check_runs(slots)
        store_mla_kernel[(triton.cdiv(len(slots), BLOCK_T), latent_dim // SCALE_COLS + 1)](
            latent,
            rope,
            slots,
            *_words(rows, layout),
            len(slots),
            len(rows),
            latent.stride(0),
            rope.stride(0),
            factor,
            IS_POWER=scale_rule == "vllm" if layout == "dsa656" else is_power,
            SCALE_FLOOR=FLOOR if scale_rule == "vllm" else 0.0,
            LAYOUT=KERNEL_LAYOUTS[layout],
            LATENT=latent_dim,
            ROPE=rope_dim,
            BLOCK_R=triton.next_power_of_2(rope_dim),
            ROW=rows.shape[1],
            BLOCK_T=BLOCK_T,
            **OPTIONS,
        )


@launches
def dequantize_kv_mla(
    cache: Tensor,
    slots: Tensor,
    *,
    layout: Layout,
    scale: float = 1.0,
    latent_dim: int = 512,
    rope_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Latent [T, latent_dim] and rope [T, rope_dim] of rows ``slots``: one rounding to float32, one to ``dtype``."""
    check_slots(slots)
    rows = mla_rows(cache, row_bytes(layout, latent_dim, rope_dim), slots)
    check_row_scale(layout, scale)
    scale = check_scale("scale", scale)
    latent = empty_output((len(slots), latent_dim), dtype, cache)
    rope = empty_output((len(slots), rope_dim), dtype, cache)
    if len(slots):
        check_runs(slots)
        read_mla_kernel[(triton.cdiv(len(slots), BLOCK_T), latent_dim // SCALE_COLS + 1)](
            *_words(rows, layout),
            slots,
            latent,
            rope,
            len(slots),
            len(rows),
            scale,
            LAYOUT=KERNEL_LAYOUTS[layout],
            LATENT=latent_dim,
            ROPE=rope_dim,
            BLOCK_R=triton.next_power_of_2(rope_dim),
            ROW=rows.shape[1],
            BLOCK_T=BLOCK_T,
            **OPTIONS,
        )
    return latent, rope


@launches
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
    """Store ``key`` [T, H, D] and ``value`` [T, H, D'], divided by their scales, in E4M3 caches [..., H, D].

    Caches are uint8 or float8_e4m3fn. Two bytes are read for each that is written. Raises ValueError for what does not
    go together.
    """
    check_slots(slots)
    rows, widths, factors = [], [], []
    for name, part, cache, scale in (
        ("key", key, key_cache, key_scale),
        ("value", value, value_cache, value_scale),
    ):
        check_input(name, part, 3, slots)
        if cache.shape[-2:] != part.shape[1:]:
            raise ValueError(f"{name}_cache ends in {tuple(cache.shape[-2:])}, {name} in {tuple(part.shape[1:])}")
        widths.append(part.shape[1] * part.shape[2])
        rows.append(rows_of(f"{name}_cache", as_bytes(cache), widths[-1], slots))
        factors.append(factor_of(f"{name}_scale", scale))
    check_same_slots(rows)
    if len(slots):
        check_runs(slots)
        store_kv_kernel[(triton.cdiv(len(slots), BLOCK_T), triton.cdiv(max(widths), SCALE_COLS), 2)](
            key,
            value,
            slots,
            *rows,
            len(slots),
            len(rows[0]),
            key.stride(0),
            value.stride(0),
            factors[0][0],
            factors[1][0],
            IS_KEY_POWER=factors[0][1],
            IS_VALUE_POWER=factors[1][1],
            KEY=widths[0],
            VALUE=widths[1],
            BLOCK_T=BLOCK_T,
            **OPTIONS,
        )


@launches
def dequantize_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Key [T, H, D] and value [T, H, D'] of rows ``slots``."""
    check_slots(slots)
    rows, outputs, scales = [], [], []
    for name, cache, scale in (("key", key_cache, key_scale), ("value", value_cache, value_scale)):
        scales.append(check_scale(f"{name}_scale", scale))
        if cache.ndim < 3:
            raise ValueError(f"{name}_cache must be [..., heads, columns], not {tuple(cache.shape)}")
        rows.append(rows_of(f"{name}_cache", as_bytes(cache), cache.shape[-2] * cache.shape[-1], slots))
        outputs.append(empty_output((len(slots), *cache.shape[-2:]), dtype, cache))
    check_same_slots(rows)
    widths = [row.shape[1] for row in rows]
    if len(slots):
        check_runs(slots)
        read_kv_kernel[(triton.cdiv(len(slots), BLOCK_T), triton.cdiv(max(widths), SCALE_COLS), 2)](
            *rows,
            slots,
            *outputs,
            len(slots),
            len(rows[0]),
            *scales,
            KEY=widths[0],
            VALUE=widths[1],
            BLOCK_T=BLOCK_T,
            **OPTIONS,
        )
    return outputs[0], outputs[1]


@launches
def quantize_index_keys(keys: Tensor, slots: Tensor, cache: Tensor, *, scale_rule: ScaleRule = "sglang") -> None:
    """Store the indexer's ``keys`` [T, 128] in ``cache`` uint8 [pages, page size, 132]. 256 bytes in, 132 out.

    A page holds the codes of all its keys, and behind them all their float32 scales: its shape counts bytes only.
    """
    check_slots(slots)
    check_rule(scale_rule)
    check_input("keys", keys, 2, slots)
    if keys.shape[1] != SCALE_COLS:
        raise ValueError(f"an index key has {SCALE_COLS} columns, not {keys.shape[1]}")
    rows = index_rows(cache, slots)
    if len(slots):
        check_runs(slots)
        store_index_kernel[(triton.cdiv(len(slots), BLOCK_T),)](
            keys,
            slots,
            rows,
            rows.view(torch.float32),
            len(slots),
            len(rows),
            keys.stride(0),
            AMAX_FLOOR=FLOOR,
            IS_POWER=scale_rule == "vllm",
            PAGE=cache.shape[1],
            BLOCK_T=BLOCK_T,
            **OPTIONS,
        )


@launches
def dequantize_index_keys(cache: Tensor, slots: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The indexer's keys [T, 128] of ``slots``."""
    check_slots(slots)
    rows = index_rows(cache, slots)
    keys = empty_output((len(slots), SCALE_COLS), dtype, cache)
    if len(slots):
        check_runs(slots)
        read_index_kernel[(triton.cdiv(len(slots), BLOCK_T),)](
            rows,
            rows.view(torch.float32),
            slots,
            keys,
            len(slots),
            len(rows),
            PAGE=cache.shape[1],
            BLOCK_T=BLOCK_T,
            **OPTIONS,
        )
    return keys
