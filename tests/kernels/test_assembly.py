"""The assembly of the kernels, which the interpreter goes round: every block, run instruction by instruction."""

import numpy as np
import pytest
import torch

from quantkit.numerics import absmax, bfloat16, fp8, packing
from quantkit_kernels import absmax_jit, attention_jit, int4_decode_jit
from tests.kernels.ptx import run_block

LIFT = 0x4B804B80  # two BF16 2**24


def bf16(values):
    """The nearest BF16, as bits."""
    return bfloat16.from_float32(np.asarray(values, np.float32))


def halves(registers):
    """Pairs as [N, 2 pairs], the lower half first."""
    return np.stack([(one >> np.uint64(shift)) & np.uint64(0xFFFF) for one in registers for shift in (0, 16)], axis=1)


def test_int4_words_become_weights_in_the_order_of_their_nibbles():
    """Every pair of nibbles at every place, with scales of both signs and all sizes."""
    rng = np.random.default_rng(1)
    words = rng.integers(0, 2**32, 1 << 16, dtype=np.uint32)
    pairs = np.arange(1 << 16, dtype=np.uint32)  # the low and the high half of a word
    words = np.concatenate([words, pairs, pairs << 16])
    scale = bf16(rng.standard_normal(len(words)) * np.exp2(rng.uniform(-20, 20, len(words))))
    outputs = run_block(int4_decode_jit.DECODE_WORD.value, 8, words, scale)
    got = np.stack([one.astype(np.uint16) for one in outputs], axis=1)
    # output 2 j + h is nibble j of half h
    nibble = np.array([j + 4 * h for j in range(4) for h in range(2)], np.uint32)
    code = ((words[:, None] >> (4 * nibble)) & 15).astype(np.float32) - 8
    wanted = bf16(code * bfloat16.to_float32(scale)[:, None])
    # a weight of zero has the sign that its scale gives it
    assert (bfloat16.to_float32(got) == bfloat16.to_float32(wanted)).all()


def test_e4m3_become_halves_in_their_order():
    codes = np.arange(256, dtype=np.uint8)
    words = np.random.default_rng(2).permutation(np.tile(codes, 64)).view(np.uint32)
    outputs = run_block(E4M3_TO_FP16, 2, words, np.zeros_like(words))
    got = halves(outputs).astype(np.uint16).view(np.float16)
    wanted = torch.from_numpy(words.view(np.uint8)).view(torch.float8_e4m3fn).to(torch.float16).numpy()
    assert np.array_equal(got.reshape(-1), wanted, equal_nan=True)


E4M3_TO_FP16 = attention_jit.E4M3_TO_FP16.value


def pairs_of_fp8(codes, scale):
    outputs = run_block(absmax_jit.READ_FP8.value, 5, codes.view(np.uint64).reshape(-1), scale)
    return outputs[:4], outputs[4]


def test_absmax_reads_every_code_with_every_size_of_scale():
    rng = np.random.default_rng(3)
    codes = rng.permutation(np.tile([c for c in range(256) if c & 0x7F != 0x7F], 512)).astype(np.uint8).reshape(-1, 8)
    scale = np.exp2(rng.uniform(-140, 110, len(codes))).astype(np.float32)
    pairs, largest = pairs_of_fp8(codes, scale)
    values = fp8.dequantize(codes, scale[:, None], block=(1, 8))
    wanted = bf16(values)
    assert (halves(pairs) == wanted).all()
    found = np.maximum(largest & np.uint64(0xFFFF), largest >> np.uint64(16))
    assert (found == (wanted & 0x7FFF).max(axis=1)).all()


def test_absmax_reads_bf16_as_it_is():
    bits = np.random.default_rng(4).integers(0, 0x7F80, (4096, 8)).astype(np.uint16)
    bits ^= (np.arange(8) % 2 << 15).astype(np.uint16)
    words = bits.view(np.uint64)
    *pairs, largest = run_block(absmax_jit.READ_BF16.value, 5, words[:, 0].copy(), words[:, 1].copy())
    assert (halves(pairs) == bits).all()
    found = np.maximum(largest & np.uint64(0xFFFF), largest >> np.uint64(16))
    assert (found == (bits & 0x7FFF).max(axis=1)).all()


@pytest.mark.parametrize("exponents", [(-120, 124), (-134, -120)], ids=["normal", "subnormal"])
def test_absmax_writes_the_codes_of_the_specification(exponents):
    """Groups of eight, whose scale is that of the specification; those with a subnormal one are lifted."""
    rng = np.random.default_rng(5)
    sizes = np.exp2(rng.uniform(*exponents, (1 << 15, 1))).astype(np.float32)
    values = (rng.standard_normal((1 << 15, 8)) * sizes).astype(np.float32)
    values[::7, 3] = 0.0
    bits = bf16(values)
    codes, scale = absmax.quantize_absmax(bits, group_size=8)
    wide = bfloat16.to_float32(scale[:, 0])
    is_tiny = scale[:, 0] < 0x0080
    assert (is_tiny.mean() > 0.5) == (exponents[0] < -120)
    lift = np.where(is_tiny, LIFT, 0x3F803F80).astype(np.uint32)
    lifted = wide * np.where(is_tiny, np.float32(2**24), np.float32(1))
    inverse = np.float32(1) / lifted
    pairs = bits.view(np.uint32)
    for ulps in (-2, 0, 2):  # a GPU's reciprocal is off by at most so much
        near = (inverse.view(np.int32) + ulps).view(np.float32)
        operands = [np.ascontiguousarray(pairs[:, i]) for i in range(4)]
        (words,) = run_block(absmax_jit.WRITE.value, 1, *operands, lift, near)
        assert (words.astype(np.uint32) == packing.pack_int4(codes)[:, 0].view(np.uint32)).all()


def test_products_with_reciprocals_round_to_bf16_as_quotients_do():
    """All significands, at sizes of the quotient from the largest down to where codes are zero, subnormal ones too."""
    significands = np.arange(128, 256, dtype=np.float32)
    for exponent in (-149, -140, -130, -127, -60, 0, 100, 119):
        scale = significands * np.float32(2.0**exponent)
        scale = scale[scale >= np.float32(2.0**-126)]
        inverse = np.float32(1) / scale
        for size in range(-6, 4 if exponent < 119 else 0):
            values = (significands * np.float32(2.0**exponent))[:, None] * np.float32(2.0**size)
            values = bfloat16.to_float32(bf16(values))
            with np.errstate(over="ignore"):
                wanted = bf16(values / scale)
            for ulps in (-2, -1, 0, 1, 2):
                near = (inverse.view(np.int32) + ulps).view(np.float32)
                assert (bf16(values * near) == wanted).all()


def test_a_seventh_and_a_half_is_multiplied_as_it_is_divided():
    amax = bfloat16.to_float32(np.arange(0x7F80, dtype=np.uint16))
    assert (bf16(amax * np.float32(1 / 7.5)) == bf16(amax / np.float32(7.5))).all()
