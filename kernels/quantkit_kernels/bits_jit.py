"""BF16, E4M3 and INT4 by their bits: exact on a GPU, and in the interpreter, whose own casts of them are wrong."""

import triton
import triton.language as tl

ZERO_GROUP_SCALE = tl.constexpr(0x3C00)  # BF16 2**-7: of an INT4 group of zeros
_ROUND_F32 = tl.constexpr(1.5 * 2**23)  # added and taken away again, it rounds to an integer, ties to even
_ROUND_F64 = tl.constexpr(1.5 * 2**52)
_BF16_NAN = tl.constexpr(0x7FC0)
_E4M3_MAX = tl.constexpr(448.0)
_E4M3_NAN = tl.constexpr(0x7F)
_E4M3_BIAS = tl.constexpr(2.0**120)  # the biases of float32 and E4M3 differ by 120


@triton.jit
def is_nan(values):  # type: ignore[no-untyped-def]
    return values != values  # noqa: PLR0124


@triton.jit
def round_even(values):  # type: ignore[no-untyped-def]
    """float32 or float64 to the nearest integer, ties to even; of a magnitude that its significand holds twice."""
    if values.dtype == tl.float64:
        rounded = (values + _ROUND_F64) - _ROUND_F64
    else:
        rounded = (values + _ROUND_F32) - _ROUND_F32
    return rounded


@triton.jit
def bf16_word(values):  # type: ignore[no-untyped-def]
    """The nearest BF16 of float32 values, ties to even, in the upper half of each int32. No NaN."""
    word = values.to(tl.int32, bitcast=True)
    return (word + 0x7FFF + ((word >> 16) & 1)) & -65536


@triton.jit
def to_bf16(values):  # type: ignore[no-untyped-def]
    """The nearest BF16 of float32 values, ties to even; every NaN is 0x7FC0."""
    bits = tl.where(is_nan(values), _BF16_NAN, bf16_word(values) >> 16)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def widen_bf16(values):  # type: ignore[no-untyped-def]
    """BF16 as float32."""
    return (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_values(source_ptr, offsets, mask):  # type: ignore[no-untyped-def]
    """BF16, FP16 or float32 as float32."""
    values = tl.load(source_ptr + offsets, mask=mask, other=0.0)
    if source_ptr.dtype.element_ty == tl.bfloat16:
        wide = widen_bf16(values)
    else:
        wide = values.to(tl.float32)
    return wide


@triton.jit
def e4m3_codes(values):  # type: ignore[no-untyped-def]
    """The nearest E4M3 codes of float32 values, ties to even, saturating at 448; NaN is 0x7F."""
    # a clamp drops NaN, so it is looked for in what came in
    nan = is_nan(values)
    word = tl.minimum(tl.maximum(values, -_E4M3_MAX), _E4M3_MAX).to(tl.int32, bitcast=True)
    magnitude = word & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # below 2**-6 a code is an integer of 2**-9: adding 2**23 rounds to one
    steps = magnitude.to(tl.float32, bitcast=True) * 512.0 + 8388608.0
    code = tl.where(magnitude < (121 << 23), steps.to(tl.int32, bitcast=True) & 0xFF, normal)
    return tl.where(nan, _E4M3_NAN, code | ((word >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_values(codes):  # type: ignore[no-untyped-def]
    """The float32 values of E4M3 codes, exactly; NaN is 0x7FC00000. The interpreter's cast reads NaN as 480."""
    code = codes.to(tl.int32)
    word = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    # a subnormal code is a subnormal float32
    values = word.to(tl.float32, bitcast=True) * _E4M3_BIAS
    return tl.where((code & 0x7F) == _E4M3_NAN, float("nan"), values)


@triton.jit
def widen(values, INTERPRET: tl.constexpr):  # type: ignore[no-untyped-def]
    """BF16, E4M3 or others as float32; by the bits where the interpreter's cast is off."""
    if INTERPRET and values.dtype == tl.bfloat16:
        return widen_bf16(values)
    elif INTERPRET and values.dtype == tl.float8e4nv:
        return e4m3_values(values.to(tl.uint8, bitcast=True))
    else:
        return values.to(tl.float32)


@triton.jit
def e4m3_ints(codes):  # type: ignore[no-untyped-def]
    """E4M3 codes (not NaN) as integers of 2**-9."""
    code = codes.to(tl.int32)
    exponent = (code >> 3) & 15
    mantissa = code & 7
    magnitude = tl.where(exponent == 0, mantissa, (mantissa + 8) << tl.maximum(exponent - 1, 0))
    return tl.where((code & 0x80) != 0, -magnitude, magnitude)
