"""The absmax mode at the speed of memory: FP8 codes or BF16 to INT4 groups, two weights to a register.

A thread has four words of eight weights. Instructions for each weight: conversion to FP16 and float32 1.5, block scale
1, rounding to BF16 half, magnitude 1, widening 1, quotient 1.5, rounding half, clamping 1, code half, packing 1. With
what a group costs that is some 12, where an H200 has room for 15 at 70 % of its bandwidth.

The specification divides, and rounds the quotients to BF16. Here reciprocals multiply, which is the same: a quotient of
two BF16 numbers is at least 2**-18 of itself away from every number that is half way between two of BF16, since
``2**k * v = m * s`` has no solution for ``m`` of nine bits, odd, and ``v`` of eight; and nor has ``amax / 7.5``.

Suffixes: ``G`` groups of a row, ``W`` words of eight weights in a group, ``8`` weights of a word.
"""

import triton
import triton.language as tl

from quantkit_kernels.bits_jit import ZERO_GROUP_SCALE, bf16_word, e4m3_values, round_even, widen_bf16

_LEAST_SCALE = tl.constexpr(0x0080)  # the smallest normal BF16: what is below it may have no finite reciprocal
_LIFT = tl.constexpr(2.0**24)  # makes it normal, and what it divides too
_INVERSE_7_5 = tl.constexpr(1.0 / 7.5)
_ONES, _LIFTS = tl.constexpr(0x3F803F80), tl.constexpr(0x4B804B80)  # 1 and 2**24, two BF16 each


def _block(declared: str, *lines: str) -> str:
    """Assembly; a line with ``#`` stands for four, one a pair: ``^`` is its operand, ``<`` and ``>`` its weights."""
    text = [declared]
    for line in lines:
        for i in range(4) if set(line) & set("#<>") else range(1):
            places = str.maketrans({"#": str(i), "^": str(i + 1), "<": str(2 * i), ">": str(2 * i + 1)})
            text.append(line.translate(places))
    return "\n".join(["{", *text, "}"])


_PAIRS = ".reg .b32 p0, p1, p2, p3, q0, q1, q2, q3;"
_WEIGHTS = ".reg .b16 x0, x1, x2, x3, x4, x5, x6, x7; .reg .f32 f0, f1, f2, f3, f4, f5, f6, f7;"
_LARGEST = (
    "abs.bf16x2 q#, p#;",
    "mov.b32 $#, p#;",
    "max.bf16x2 q0, q0, q1;",
    "max.bf16x2 q2, q2, q3;",
    "max.bf16x2 $4, q0, q2;",
)

# eight codes, and the scale of their block, to four pairs of BF16 and the largest magnitude of either half
READ_FP8 = tl.constexpr(
    _block(
        f"{_PAIRS} {_WEIGHTS} .reg .b16 c0, c1, c2, c3;",
        "mov.b64 {c0, c1, c2, c3}, $5;",
        "cvt.rn.f16x2.e4m3x2 p#, c#;",
        "mov.b32 {x<, x>}, p#;",
        "cvt.f32.f16 f<, x<;",
        "cvt.f32.f16 f>, x>;",
        "mul.rn.f32 f<, f<, $6;",
        "mul.rn.f32 f>, f>, $6;",
        "cvt.rn.bf16x2.f32 p#, f>, f<;",
        *_LARGEST,
    )
)
# the same of eight BF16
READ_BF16 = tl.constexpr(_block(_PAIRS, "mov.b64 {p0, p1}, $5;", "mov.b64 {p2, p3}, $6;", *_LARGEST))
# four pairs, what lifts them, and the reciprocal of the scale to a word of eight codes plus 8
WRITE = tl.constexpr(
    _block(
        f"{_PAIRS} {_WEIGHTS} .reg .b32 one, zero, most, least, up;",
        "mov.b32 one, 0x3F803F80;",
        "mov.b32 zero, 0x80008000;",
        "mov.b32 most, 0x40E040E0;",
        "mov.b32 least, 0xC100C100;",
        "mov.b32 up, 0x43484348;",
        "fma.rn.bf16x2 p#, $^, $5, zero;",
        "shl.b32 q#, p#, 16;",
        "and.b32 p#, p#, 0xFFFF0000;",
        "mov.b32 f<, q#;",
        "mov.b32 f>, p#;",
        "mul.rn.f32 f<, f<, $6;",
        "mul.rn.f32 f>, f>, $6;",
        "cvt.rn.bf16x2.f32 q#, f>, f<;",
        "max.bf16x2 q#, q#, least;",
        "min.bf16x2 q#, q#, most;",
        # 200 and a code: BF16 of that size are integers, and their lowest bits are the code plus 8
        "fma.rn.bf16x2 q#, q#, one, up;",
        "and.b32 q#, q#, 0x000F000F;",
        "shl.b32 q1, q1, 8;",
        "shl.b32 q3, q3, 8;",
        "or.b32 q0, q0, q1;",
        "or.b32 q2, q2, q3;",
        # the first weights of all pairs, and the second ones, which go four bits higher
        "prmt.b32 q1, q0, q2, 0x5410;",
        "prmt.b32 q3, q0, q2, 0x7632;",
        "shl.b32 q3, q3, 4;",
        "or.b32 $0, q1, q3;",
    )
)
_FIVE = tl.constexpr((tl.int32,) * 5)


@triton.jit
def _read_values(first_GW, second_GW, scale_GW, IS_FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the assembly reads, for the interpreter: values [G, W, 8], and the largest magnitude of a word as BF16."""
    place = tl.arange(0, 8)[None, None, :]
    if IS_FP8:
        values_GW8 = e4m3_values(first_GW[:, :, None] >> (8 * place)) * scale_GW[:, :, None]
        values_GW8 = bf16_word(values_GW8).to(tl.float32, bitcast=True)
    else:
        four = tl.where(place < 4, first_GW[:, :, None], second_GW[:, :, None])
        values_GW8 = widen_bf16((four >> (16 * (place & 3))).to(tl.int16))
    return values_GW8, tl.max(tl.abs(values_GW8), axis=2).to(tl.int32, bitcast=True) >> 16


@triton.jit
def _write_words(values_GW8, lift_GW, inverse_GW):  # type: ignore[no-untyped-def]
    """What the assembly writes, for the interpreter."""
    lifted = values_GW8 * tl.where(lift_GW == _ONES, 1.0, _LIFT)[:, :, None]
    quotient = bf16_word(lifted * inverse_GW[:, :, None]).to(tl.float32, bitcast=True)
    code = round_even(tl.minimum(tl.maximum(quotient, -8.0), 7.0)).to(tl.int32) + 8
    # a sum of bits that do not meet; it wraps into the sign
    return tl.sum(code << (4 * tl.arange(0, 8)[None, None, :]), axis=2)


@triton.jit
def _scale_of(largest_G):  # type: ignore[no-untyped-def]
    """BF16 bits of ``amax / 7.5`` from those of ``amax``; what to lift the group by, and the reciprocal after that."""
    amax = (largest_G << 16).to(tl.float32, bitcast=True)
    bits = bf16_word(amax * _INVERSE_7_5) >> 16
    bits = tl.where(bits == 0, ZERO_GROUP_SCALE, bits)
    scale = (bits << 16).to(tl.float32, bitcast=True)
    is_tiny = bits < _LEAST_SCALE
    inverse = 1.0 / tl.where(is_tiny, scale * _LIFT, scale)
    return bits, tl.where(is_tiny, _LIFTS, _ONES), inverse


@triton.jit(do_not_specialize=["num_rows", "row_offset", "rows_per_program"])
def absmax_kernel(  # type: ignore[no-untyped-def]
    source_ptr,
    scale_ptr,
    packed_ptr,
    int4_scale_ptr,
    num_rows,
    num_cols,
    row_offset,
    rows_per_program,
    scale_cols,
    IS_FP8: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_G: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """``TILE_G`` groups of some rows, one row after the other; of the source a word of 64 bits at a time."""
    WORDS: tl.constexpr = GROUP // 8
    groups_per_row = num_cols // GROUP
    num_tiles = tl.cdiv(groups_per_row, TILE_G)
    first_row = (tl.program_id(0) // num_tiles) * rows_per_program
    group = (tl.program_id(0) % num_tiles) * TILE_G + tl.arange(0, TILE_G)
    is_group = group < groups_per_row
    word = group[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    mask = tl.broadcast_to(is_group[:, None], word.shape)
    block_col = group * GROUP // BLOCK_COLS
    for row in range(first_row, tl.minimum(first_row + rows_per_program, num_rows)):
        start = tl.cast(row, tl.int64) * groups_per_row
        if IS_FP8:
            first = tl.load(source_ptr + start * WORDS + word, mask=mask, other=0)
            second = first
            at = ((row + row_offset) // BLOCK_ROWS) * scale_cols + block_col
            scale = tl.load(scale_ptr + at, mask=is_group, other=0.0)
        else:
            first = tl.load(source_ptr + 2 * (start * WORDS + word), mask=mask, other=0)
            second = tl.load(source_ptr + 2 * (start * WORDS + word) + 1, mask=mask, other=0)
            scale = tl.full((TILE_G,), 1.0, tl.float32)
        scale = tl.broadcast_to(scale[:, None], word.shape)
        if INTERPRET:
            values, largest = _read_values(first, second, scale, IS_FP8)
        elif IS_FP8:
            a, b, c, d, largest = tl.inline_asm_elementwise(
                READ_FP8, "=r,=r,=r,=r,=r,l,f", [first, scale], dtype=_FIVE, is_pure=True, pack=1
            )
            largest = tl.maximum(largest & 0xFFFF, largest >> 16)
        else:
            a, b, c, d, largest = tl.inline_asm_elementwise(
                READ_BF16, "=r,=r,=r,=r,=r,l,l", [first, second], dtype=_FIVE, is_pure=True, pack=1
            )
            largest = tl.maximum(largest & 0xFFFF, largest >> 16)
        bits, lift, inverse = _scale_of(tl.max(largest, axis=1))
        lift = tl.broadcast_to(lift[:, None], word.shape)
        inverse = tl.broadcast_to(inverse[:, None], word.shape)
        if INTERPRET:
            words = _write_words(values, lift, inverse)
        else:
            words = tl.inline_asm_elementwise(
                WRITE, "=r,r,r,r,r,r,f", [a, b, c, d, lift, inverse], dtype=tl.int32, is_pure=True, pack=1
            )
        tl.store(packed_ptr + start * WORDS + word, words, mask=mask)
        tl.store(int4_scale_ptr + start + group, bits.to(tl.int16), mask=is_group)
