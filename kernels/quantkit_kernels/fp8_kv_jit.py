"""The kernels behind fp8_kv.py; what each must store is stated in reference/kv_cache.py.

A program takes ``BLOCK_T`` tokens and one part of their rows: a tile of 128 columns, or the rope. Codes are made by
integer operations and not by a cast, since the interpreter's cast is wrong.
"""

import triton
import triton.language as tl

from quantkit_kernels.bits_jit import e4m3_codes, is_nan, load_values, to_bf16
from quantkit_kernels.kv_layout import SCALE_COLS

FLAT, DSA, BF16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # layouts of a row
TILE = tl.constexpr(SCALE_COLS)
_E4M3_MAX = tl.constexpr(448.0)
_TINY = tl.constexpr(2.0**-128)  # scales up to here have no finite reciprocal


@triton.jit
def row_offsets(slots, ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where rows begin: in int64, since a pool has more than 2**31 bytes."""
    return slots.to(tl.int64) * ROW


@triton.jit
def index_offsets(slots, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes to a key and float32 words to its scale: a page holds its keys, then its scales."""
    page = slots.to(tl.int64) // PAGE
    within = slots.to(tl.int64) - page * PAGE
    page_words = page * (PAGE * (TILE // 4 + 1))
    return page_words * 4 + within * TILE, page_words + PAGE * (TILE // 4) + within


@triton.jit
def tokens(slots_ptr, num_tokens, num_slots, BLOCK_T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tokens of this program, their slots, which of them exist, and which of those have a slot in the cache."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    slot = tl.load(slots_ptr + token, mask=is_token, other=-1).to(tl.int64)
    return token, slot, is_token, (slot >= 0) & (slot < num_slots)


@triton.jit
def _load_bf16(source_ptr, offsets, mask):  # type: ignore[no-untyped-def]
    """BF16 as it is, or rounded from FP16."""
    if source_ptr.dtype.element_ty == tl.bfloat16:
        values = tl.load(source_ptr + offsets, mask=mask, other=0.0)
    else:
        values = to_bf16(load_values(source_ptr, offsets, mask))
    return values


@triton.jit
def _scaled_codes(values, scale, IS_POWER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes of ``values / scale``; dividing by a power of two is multiplying by ``scale``, its reciprocal."""
    quotient = values * scale if IS_POWER else tl.math.div_rn(values, tl.full(values.shape, scale, tl.float32))
    return e4m3_codes(quotient)


@triton.jit
def _tile_scale(  # type: ignore[no-untyped-def]
    values, AMAX_FLOOR: tl.constexpr, SCALE_FLOOR: tl.constexpr, IS_POWER: tl.constexpr
):
    """The scale of each row of a tile, and what to multiply by: 0 for one of zeros. NaN does not count."""
    amax = tl.max(tl.where(is_nan(values), 0.0, tl.abs(values)), axis=1)
    amax = tl.maximum(amax, AMAX_FLOOR)
    scale = tl.maximum(tl.math.div_rn(amax, tl.full(amax.shape, _E4M3_MAX, tl.float32)), SCALE_FLOOR)
    if IS_POWER:
        # the next power of two: a significand that is not zero carries into the exponent
        word = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = word.to(tl.float32, bitcast=True)
    is_tiny = scale <= _TINY
    inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(is_tiny, 1.0, scale))
    return scale, tl.where(is_tiny, 0.0, inverse)


@triton.jit
def _store_codes(  # type: ignore[no-untyped-def]
    source_ptr, offsets, cache_ptr, at, mask, scale, IS_POWER: tl.constexpr
):
    tl.store(cache_ptr + at, _scaled_codes(load_values(source_ptr, offsets, mask), scale, IS_POWER), mask=mask)


@triton.jit
def columns(row, stride, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, is_row):  # type: ignore[no-untyped-def]
    """Offsets of ``BLOCK`` columns from ``first`` on, and which of them exist."""
    column = first + tl.arange(0, BLOCK)
    offsets = (row * stride)[:, None] + column[None, :]
    return offsets, is_row[:, None] & (column < WIDTH)[None, :]


@triton.jit(do_not_specialize=["num_tokens"])  # a batch of another size is the same kernel
def store_mla_kernel(  # type: ignore[no-untyped-def]
    latent_ptr,
    rope_ptr,
    slots_ptr,
    cache_ptr,
    cache16_ptr,
    cache32_ptr,
    num_tokens,
    num_slots,
    latent_stride,
    rope_stride,
    scale,
    IS_POWER: tl.constexpr,
    SCALE_FLOOR: tl.constexpr,
    LAYOUT: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One tile of the latents, or, after the tiles, the rope. The cache comes in 8, 16 and 32 bits."""
    token, slot, _is_token, is_stored = tokens(slots_ptr, num_tokens, num_slots, BLOCK_T)
    part = tl.program_id(1)
    if part < LATENT // TILE:
        source, mask = columns(token, latent_stride, part * TILE, LATENT, TILE, is_stored)
        column = part * TILE + tl.arange(0, TILE)
        if LAYOUT == FLAT:
            at = row_offsets(slot, ROW)[:, None] + column[None, :]
            _store_codes(latent_ptr, source, cache_ptr, at, mask, scale, IS_POWER)
        elif LAYOUT == DSA:
            values = load_values(latent_ptr, source, mask)
            tile_scale, inverse = _tile_scale(values, 0.0, SCALE_FLOOR, IS_POWER)
            at = row_offsets(slot, ROW)[:, None] + column[None, :]
            tl.store(cache_ptr + at, e4m3_codes(values * inverse[:, None]), mask=mask)
            tl.store(cache32_ptr + row_offsets(slot, ROW // 4) + (LATENT // 4 + part), tile_scale, mask=is_stored)
        else:
            at = row_offsets(slot, ROW // 2)[:, None] + column[None, :]
            tl.store(cache16_ptr + at, _load_bf16(latent_ptr, source, mask), mask=mask)
    else:
        rope_source, rope_mask = columns(token, rope_stride, 0, ROPE, BLOCK_R, is_stored)
        rope_column = tl.arange(0, BLOCK_R)
        if LAYOUT == FLAT:
            rope_at = row_offsets(slot, ROW)[:, None] + (LATENT + rope_column)[None, :]
            _store_codes(rope_ptr, rope_source, cache_ptr, rope_at, rope_mask, scale, IS_POWER)
        else:
            # rope is what ends the row
            rope_at = row_offsets(slot, ROW // 2)[:, None] + (ROW // 2 - ROPE + rope_column)[None, :]
            tl.store(cache16_ptr + rope_at, _load_bf16(rope_ptr, rope_source, rope_mask), mask=rope_mask)


@triton.jit(do_not_specialize=["num_tokens"])  # a batch of another size is the same kernel
def store_kv_kernel(  # type: ignore[no-untyped-def]
    key_ptr,
    value_ptr,
    slots_ptr,
    key_cache_ptr,
    value_cache_ptr,
    num_tokens,
    num_slots,
    key_stride,
    value_stride,
    key_scale,
    value_scale,
    IS_KEY_POWER: tl.constexpr,
    IS_VALUE_POWER: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """128 columns of the keys of ``BLOCK_T`` tokens, or of their values: all heads of a token are one row."""
    token, slot, _is_token, is_stored = tokens(slots_ptr, num_tokens, num_slots, BLOCK_T)
    first = tl.program_id(1) * TILE
    if tl.program_id(2) == 0:
        key_source, key_mask = columns(token, key_stride, first, KEY, TILE, is_stored)
        key_at, _key_mask = columns(row_offsets(slot, KEY), 1, first, KEY, TILE, is_stored)
        _store_codes(key_ptr, key_source, key_cache_ptr, key_at, key_mask, key_scale, IS_KEY_POWER)
    else:
        value_source, value_mask = columns(token, value_stride, first, VALUE, TILE, is_stored)
        value_at, _value_mask = columns(row_offsets(slot, VALUE), 1, first, VALUE, TILE, is_stored)
        _store_codes(value_ptr, value_source, value_cache_ptr, value_at, value_mask, value_scale, IS_VALUE_POWER)


@triton.jit(do_not_specialize=["num_tokens"])  # a batch of another size is the same kernel
def store_index_kernel(  # type: ignore[no-untyped-def]
    keys_ptr,
    slots_ptr,
    cache_ptr,
    cache32_ptr,
    num_tokens,
    num_slots,
    stride,
    AMAX_FLOOR: tl.constexpr,
    IS_POWER: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """The index keys of ``BLOCK_T`` tokens."""
    token, slot, _is_token, is_stored = tokens(slots_ptr, num_tokens, num_slots, BLOCK_T)
    source, mask = columns(token, stride, 0, TILE, TILE, is_stored)
    values = load_values(keys_ptr, source, mask)
    scale, inverse = _tile_scale(values, AMAX_FLOOR, 0.0, IS_POWER)
    key_at, scale_at = index_offsets(slot, PAGE)
    at, _mask = columns(key_at, 1, 0, TILE, TILE, is_stored)
    tl.store(cache_ptr + at, e4m3_codes(values * inverse[:, None]), mask=mask)
    tl.store(cache32_ptr + scale_at, scale, mask=is_stored)
