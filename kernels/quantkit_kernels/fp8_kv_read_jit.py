"""The readers of fp8_kv.py: rows of the cache, gathered by slot, as floats. Programs are those of fp8_kv_jit.py."""

import triton
import triton.language as tl

from quantkit_kernels.bits_jit import e4m3_values, is_nan, load_values, to_bf16
from quantkit_kernels.fp8_kv_jit import (
    BF16,
    DSA,
    FLAT,
    TILE,
    columns,
    index_offsets,
    row_offsets,
    tokens,
)

_FP16_NAN, _FP32_NAN = tl.constexpr(0x7E00), tl.constexpr(0x7FC00000)


@triton.jit
def _store_floats(out_ptr, at, values, mask):  # type: ignore[no-untyped-def]
    """Float32 values in the dtype of ``out_ptr``, ties to even, with one NaN for each dtype."""
    if out_ptr.dtype.element_ty == tl.bfloat16:
        out = to_bf16(values)
    elif out_ptr.dtype.element_ty == tl.float16:
        half = values.to(tl.float16).to(tl.int16, bitcast=True)
        out = tl.where(is_nan(values), _FP16_NAN, half).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        word = tl.where(is_nan(values), _FP32_NAN, values.to(tl.int32, bitcast=True))
        out = word.to(tl.float32, bitcast=True)
    tl.store(out_ptr + at, out, mask=mask)


@triton.jit
def _read_codes(cache_ptr, offsets, is_read, scale, out_ptr, at, is_written):  # type: ignore[no-untyped-def]
    """What is not in the cache is read as the code of zero."""
    codes = tl.load(cache_ptr + offsets, mask=is_read, other=0)
    _store_floats(out_ptr, at, e4m3_values(codes) * scale, is_written)


@triton.jit
def _read_bf16(cache16_ptr, offsets, is_read, out_ptr, at, is_written):  # type: ignore[no-untyped-def]
    """BF16 to BF16 are the bits, whatever they mean."""
    if out_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(out_ptr + at, tl.load(cache16_ptr + offsets, mask=is_read, other=0.0), mask=is_written)
    else:
        _store_floats(out_ptr, at, load_values(cache16_ptr, offsets, is_read), is_written)


@triton.jit(do_not_specialize=["num_tokens"])
def read_mla_kernel(  # type: ignore[no-untyped-def]
    cache_ptr,
    cache16_ptr,
    cache32_ptr,
    slots_ptr,
    latent_ptr,
    rope_ptr,
    num_tokens,
    num_slots,
    scale,
    LAYOUT: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One tile of the latents, or, after the tiles, the rope. The cache comes in 8, 16 and 32 bits."""
    token, slot, is_token, is_stored = tokens(slots_ptr, num_tokens, num_slots, BLOCK_T)
    part = tl.program_id(1)
    if part < LATENT // TILE:
        at, is_written = columns(token, LATENT, part * TILE, LATENT, TILE, is_token)
        is_read = is_written & is_stored[:, None]
        column = part * TILE + tl.arange(0, TILE)
        if LAYOUT == BF16:
            source = row_offsets(slot, ROW // 2)[:, None] + column[None, :]
            _read_bf16(cache16_ptr, source, is_read, latent_ptr, at, is_written)
        else:
            source = row_offsets(slot, ROW)[:, None] + column[None, :]
            if LAYOUT == DSA:
                tile_at = row_offsets(slot, ROW // 4) + (LATENT // 4 + part)
                tile_scale = tl.load(cache32_ptr + tile_at, mask=is_stored, other=0.0)[:, None]
                _read_codes(cache_ptr, source, is_read, tile_scale, latent_ptr, at, is_written)
            else:
                _read_codes(cache_ptr, source, is_read, scale, latent_ptr, at, is_written)
    else:
        rope_at, is_rope_written = columns(token, ROPE, 0, ROPE, BLOCK_R, is_token)
        is_rope_read = is_rope_written & is_stored[:, None]
        rope_column = tl.arange(0, BLOCK_R)
        if LAYOUT == FLAT:
            rope_source = row_offsets(slot, ROW)[:, None] + (LATENT + rope_column)[None, :]
            _read_codes(cache_ptr, rope_source, is_rope_read, scale, rope_ptr, rope_at, is_rope_written)
        else:
            rope_source = row_offsets(slot, ROW // 2)[:, None] + (ROW // 2 - ROPE + rope_column)[None, :]
            _read_bf16(cache16_ptr, rope_source, is_rope_read, rope_ptr, rope_at, is_rope_written)


@triton.jit(do_not_specialize=["num_tokens"])
def read_kv_kernel(  # type: ignore[no-untyped-def]
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    key_ptr,
    value_ptr,
    num_tokens,
    num_slots,
    key_scale,
    value_scale,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """128 columns of the keys of ``BLOCK_T`` tokens, or of their values."""
    token, slot, is_token, is_stored = tokens(slots_ptr, num_tokens, num_slots, BLOCK_T)
    first = tl.program_id(1) * TILE
    if tl.program_id(2) == 0:
        key_at, is_key = columns(token, KEY, first, KEY, TILE, is_token)
        key_source, _is_key = columns(row_offsets(slot, KEY), 1, first, KEY, TILE, is_token)
        _read_codes(key_cache_ptr, key_source, is_key & is_stored[:, None], key_scale, key_ptr, key_at, is_key)
    else:
        value_at, is_value = columns(token, VALUE, first, VALUE, TILE, is_token)
        value_source, _is_value = columns(row_offsets(slot, VALUE), 1, first, VALUE, TILE, is_token)
        is_value_read = is_value & is_stored[:, None]
        _read_codes(value_cache_ptr, value_source, is_value_read, value_scale, value_ptr, value_at, is_value)


@triton.jit(do_not_specialize=["num_tokens"])
def read_index_kernel(  # type: ignore[no-untyped-def]
    cache_ptr,
    cache32_ptr,
    slots_ptr,
    keys_ptr,
    num_tokens,
    num_slots,
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """The index keys of ``BLOCK_T`` tokens."""
    token, slot, is_token, is_stored = tokens(slots_ptr, num_tokens, num_slots, BLOCK_T)
    at, is_written = columns(token, TILE, 0, TILE, TILE, is_token)
    key_at, scale_at = index_offsets(slot, PAGE)
    source, _mask = columns(key_at, 1, 0, TILE, TILE, is_token)
    scale = tl.load(cache32_ptr + scale_at, mask=is_stored, other=0.0)[:, None]
    _read_codes(cache_ptr, source, is_written & is_stored[:, None], scale, keys_ptr, at, is_written)
