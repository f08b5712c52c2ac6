"""INT4 words to BF16 weights in registers, in the order in which a tensor core wants them.

For each word of eight codes: a shift and a mask a pair, which also puts the code into the significand of 128 + code; a
subtraction of 136 and a multiplication with the scale for both halves at once. That is 2.1 instructions a weight, of
the 3.6 to 3.9 that an H200 may issue at the speed of its memory. The product of code and scale is rounded to BF16 once.
Both are fused multiply-adds, with 1 and with -0: plain ones exist from sm_90 on, these from sm_80.
"""

import triton
import triton.language as tl

from quantkit_kernels import word_order
from quantkit_kernels.bits_jit import bf16_word, widen_bf16

TILE_COLS = tl.constexpr(word_order.TILE_COLS)
TILE_WORDS = tl.constexpr(word_order.TILE_WORDS)

DECODE_WORD = tl.constexpr("""{
.reg .b32 scale, one, eights, zero, a, b, c, d;
mov.b32 scale, {$9, $9};
mov.b32 one, 0x3F803F80;
mov.b32 eights, 0xC308C308;
mov.b32 zero, 0x80008000;
shr.u32 b, $8, 4;
shr.u32 c, $8, 8;
shr.u32 d, $8, 12;
lop3.b32 a, $8, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 a, a, one, eights;
fma.rn.bf16x2 b, b, one, eights;
fma.rn.bf16x2 c, c, one, eights;
fma.rn.bf16x2 d, d, one, eights;
fma.rn.bf16x2 a, a, scale, zero;
fma.rn.bf16x2 b, b, scale, zero;
fma.rn.bf16x2 c, c, scale, zero;
fma.rn.bf16x2 d, d, scale, zero;
mov.b32 {$0, $1}, a;
mov.b32 {$2, $3}, b;
mov.b32 {$4, $5}, c;
mov.b32 {$6, $7}, d;
}""")
_EIGHT = tl.constexpr((tl.bfloat16,) * 8)


@triton.jit
def _join(a, b, c, d):  # type: ignore[no-untyped-def]
    """Four tensors as two last dimensions, in their order."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def row_of(item, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which row of the tile to load as number ``item``.

    A load gives eight neighbours to a warp, wgmma wants eight and the eight that follow them in one warp. So a warp
    loads what it will multiply, and nothing has to pass through shared memory on the way.
    """
    return (
        (item & 7)
        | ((item // (8 * WARPS) & 1) << 3)
        | ((item // 8 % WARPS) << 4)
        | (item // (16 * WARPS) * (16 * WARPS))
    )


@triton.jit
def decode_tile(  # type: ignore[no-untyped-def]
    words, scale, ROWS: tl.constexpr, WARPS: tl.constexpr, IS_REPACKED: tl.constexpr, INTERPRET: tl.constexpr
):
    """Weights [ROWS, 128] of a tile of words [ROWS, 16], loaded as ``row_of`` says, with the scale of each word.

    BF16; float32 of the same values in the interpreter, whose BF16 dots are wrong. The order of columns is that of
    ``repack``, or a checkpoint's own.
    """
    REPEATS: tl.constexpr = ROWS // (16 * WARPS)
    if INTERPRET:
        wide = widen_bf16(scale)
        number = tl.arange(0, 8)[None, None, :]
        code = ((words[:, :, None] >> (4 * (number // 2) + 16 * (number % 2))) & 15) - 8
        halves = bf16_word(code.to(tl.float32) * wide[:, :, None]).to(tl.float32, bitcast=True)
    else:
        a0, a1, b0, b1, c0, c1, d0, d1 = tl.inline_asm_elementwise(
            DECODE_WORD, "=h,=h,=h,=h,=h,=h,=h,=h,r,h", [words, scale], dtype=_EIGHT, is_pure=True, pack=1
        )
        # the pair's number in two bits, then its half
        halves = tl.join(_join(a0, b0, c0, d0), _join(a1, b1, c1, d1))
    if IS_REPACKED:
        # word 4 * t + p: columns 32 * p + 8 * pair + 2 * t + half
        split = tl.reshape(halves, (REPEATS, 2, WARPS, 8, 4, 4, 4, 2))
        ordered = tl.permute(split, (0, 2, 1, 3, 5, 6, 4, 7))
    else:
        # word w: columns 8 * w + 4 * half + pair
        split = tl.reshape(halves, (REPEATS, 2, WARPS, 8, 16, 4, 2))
        ordered = tl.permute(split, (0, 2, 1, 3, 4, 6, 5))
    return tl.reshape(ordered, (ROWS, TILE_COLS))
