"""What the decode kernels share: queries in two FP8 terms, one step of the softmax, dots, and the merge of splits.

Tokens are the rows of every dot and heads the columns: 64 tokens fill a wgmma, 16 heads would leave three quarters of
it empty. Suffixes: ``H`` heads, ``T`` tokens, ``C`` columns.
"""

import triton
import triton.language as tl

from quantkit_kernels.bits_jit import e4m3_codes, to_bf16, widen

LOG_2 = tl.constexpr(0.6931471805599453)
E4M3_TO_FP16 = tl.constexpr("""{
.reg .b16 lo, hi;
mov.b32 {lo, hi}, $2;
cvt.rn.f16x2.e4m3x2 $0, lo;
cvt.rn.f16x2.e4m3x2 $1, hi;
}""")


@triton.jit
def dot(a, b, acc, INTERPRET: tl.constexpr):  # type: ignore[no-untyped-def]
    """``acc + a @ b``; the interpreter would multiply the bit patterns of BF16."""
    if INTERPRET:
        return tl.dot(widen(a, INTERPRET), widen(b, INTERPRET), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _e4m3(values, INTERPRET: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 to the nearest E4M3, ties to even, at most 448; in integers where the interpreter's cast is off."""
    if INTERPRET:
        return e4m3_codes(values).to(tl.float8e4nv, bitcast=True)
    else:
        return values.to(tl.float8e4nv)


@triton.jit
def amax_unit(amax_H):  # type: ignore[no-untyped-def]
    """A power of two for each head, and its inverse: times the inverse, values of at most ``amax`` stay below 256."""
    exponent = tl.minimum(tl.maximum(amax_H.to(tl.int32, bitcast=True) >> 23, 16), 246)
    unit = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    unit = tl.where(amax_H == float("inf"), float("nan"), unit)  # which E4M3 would make 448
    return unit, ((261 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def two_terms(values, INTERPRET: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two E4M3 whose sum is within 2**-8 of each value (2**-18 of the largest, 256, near zero): as exact as BF16."""
    high = _e4m3(values, INTERPRET)
    return high, _e4m3(values - widen(high, INTERPRET), INTERPRET)


@triton.jit
def e4m3_to_fp16(codes_TC, is_T, INTERPRET: tl.constexpr):  # type: ignore[no-untyped-def]
    """E4M3 as FP16, which is exact.

    The assembly has a second operand, broadcast, that it ignores: a conversion of one operand would be moved into the
    registers of the dot, where every byte of a transposed tile is picked on its own and the registers do not suffice.
    """
    if INTERPRET:
        return widen(codes_TC, INTERPRET).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            E4M3_TO_FP16,
            "=r,=r,r,r",
            [codes_TC, tl.broadcast_to(is_T[:, None].to(tl.int8), codes_TC.shape)],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def scores(keys_TC, query, INTERPRET: tl.constexpr):  # type: ignore[no-untyped-def]
    """Products of keys with one or two terms of queries, [H, C] each.

    They are summed from zero: FP8 sums keep some 14 bits on Hopper, so they must stay short.
    """
    sums_TH = tl.zeros((keys_TC.shape[0], query[0].shape[0]), tl.float32)
    sums_TH = dot(keys_TC, tl.trans(query[0]), sums_TH, INTERPRET)
    if keys_TC.dtype == tl.float8e4nv:
        sums_TH = dot(keys_TC, tl.trans(query[1]), sums_TH, INTERPRET)
    return sums_TH


@triton.jit
def softmax_step(scores_TH, lift_TH, largest_H, sums_TH):  # type: ignore[no-untyped-def]
    """One block of an online softmax in powers of two.

    ``lift``: of each token, the logarithm of what will multiply its probability; with it nothing exceeds one. ``sums``
    stay apart for each row of the block until the end, so that no reduction over the warps is needed for them.
    """
    new_H = tl.maximum(largest_H, tl.max(scores_TH + lift_TH, axis=0))
    probability_TH = tl.exp2(scores_TH - new_H[None, :])
    decay_H = tl.exp2(largest_H - new_H)
    return probability_TH, decay_H, new_H, sums_TH * decay_H[None, :] + probability_TH


@triton.jit
def add_values(acc_CH, values_TC, is_T, probability_TH, decay_H, INTERPRET: tl.constexpr):  # type: ignore[no-untyped-def]
    """``acc * decay + values^T @ probability``, in FP16 for FP8 values and else in BF16; float32 in the interpreter."""
    acc_CH = acc_CH * decay_H[None, :]
    if values_TC.dtype == tl.float8e4nv:
        values_TC = e4m3_to_fp16(values_TC, is_T, INTERPRET)
    if not INTERPRET:
        probability_TH = probability_TH.to(values_TC.dtype)
    return dot(tl.trans(values_TC), probability_TH, acc_CH, INTERPRET)


@triton.jit
def split_range(seq_lens_ptr, batch, split, num_splits, max_tokens, BLOCK_T: tl.constexpr):  # type: ignore[no-untyped-def]
    """First token of a split and the one behind its last: whole blocks, as even as they go; the last may be empty."""
    num_tokens = tl.maximum(tl.minimum(tl.load(seq_lens_ptr + batch), max_tokens), 0)
    length = tl.cdiv(tl.cdiv(num_tokens, BLOCK_T), num_splits) * BLOCK_T
    return split * length, tl.minimum(split * length + length, num_tokens)


@triton.jit
def block_rows(page_row_ptr, first, end, BLOCK_T: tl.constexpr, PAGE_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cache rows of a block of tokens, int64, and which of them there are. No page is read behind the end."""
    token_T = first + tl.arange(0, BLOCK_T)
    is_token_T = token_T < end
    if PAGE_SIZE % BLOCK_T == 0:
        page = tl.load(page_row_ptr + first // PAGE_SIZE)
    else:
        page = tl.load(page_row_ptr + token_T // PAGE_SIZE, mask=is_token_T, other=0)
    return page.to(tl.int64) * PAGE_SIZE + token_T % PAGE_SIZE, is_token_T


@triton.jit
def normalize(sums_TH, largest_H, value_scale, IS_WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What values are multiplied by at the end, and the lse; that of a split is in powers of two."""
    sum_H = tl.sum(sums_TH, axis=0)
    sum_H = tl.where(sum_H == 0.0, 1.0, sum_H)  # no tokens: out 0 and, by the maximum, lse -inf
    lse_H = largest_H + tl.log2(sum_H)
    if IS_WHOLE:
        lse_H = lse_H * LOG_2
    return value_scale / sum_H, lse_H


@triton.jit
def store_heads(out_ptr, row_H, acc_CH, factor_H, is_head_H, column, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """``acc * factor`` in rows of ``WIDTH``, from ``column`` on; rounded where the output is BF16."""
    at_CH = row_H[None, :] * WIDTH + column + tl.arange(0, acc_CH.shape[0])[:, None]
    values_CH = acc_CH * factor_H[None, :]
    if out_ptr.dtype.element_ty == tl.bfloat16:
        values_CH = to_bf16(values_CH)
    tl.store(out_ptr + at_CH, values_CH, mask=is_head_H[None, :])


@triton.jit
def merge_splits_kernel(  # type: ignore[no-untyped-def]
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    num_splits,
    WIDTH: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Splits of one head, weighted by 2**lse, always in the same order. What an empty split left is not read."""
    row = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column_C = column_C < WIDTH
    slot_S = tl.arange(0, BLOCK_S)
    largest = tl.full((), float("-inf"), tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        at_S = first + slot_S
        lse_S = tl.load(part_lse_ptr + row * num_splits + at_S, mask=at_S < num_splits, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(lse_S, axis=0))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    acc_C = tl.zeros((BLOCK_C,), tl.float32)
    total = tl.zeros((), tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        at_S = first + slot_S
        lse_S = tl.load(part_lse_ptr + row * num_splits + at_S, mask=at_S < num_splits, other=float("-inf"))
        weight_S = tl.exp2(lse_S - base)
        is_part_SC = (lse_S != float("-inf"))[:, None] & is_column_C[None, :]
        at_SC = (row * num_splits + at_S)[:, None] * WIDTH + column_C[None, :]
        acc_C += tl.sum(tl.load(part_ptr + at_SC, mask=is_part_SC, other=0.0) * weight_S[:, None], axis=0)
        total += tl.sum(weight_S, axis=0)
    total = tl.where(total == 0.0, 1.0, total)
    out_C = acc_C / total
    tl.store(out_ptr + row * WIDTH + column_C, to_bf16(out_C), mask=is_column_C)
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + row, (largest + tl.log2(total)) * LOG_2)
