import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams

from quantkit.numerics.absmax import quantize_absmax
from quantkit.numerics.bfloat16 import from_float32


def _oracle(bits, group_size):
    weight = torch.from_numpy(bits).view(torch.bfloat16)
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group_size)
    groups = weight.unflatten(-1, (-1, group_size))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    codes = quantize(weight, scale, zero_point, args, dtype=torch.int8)
    return codes.numpy(), scale.view(torch.uint16).numpy()


def _weight(kind, seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((24, 512)).astype(np.float32)
    if kind == "tied":  # quotients that fall on halves before and after they are rounded to BF16
        values = np.float32(0.5) * rng.integers(-15, 16, values.shape).astype(np.float32)
        values[:, ::32] = 7.5
    elif kind == "zero":
        values[rng.random((24, 16)).repeat(32, 1) < 0.5] = 0
    elif kind == "tiny":
        values *= np.float32(1e-40)
    elif kind == "underflow":  # amax / 7.5 rounds to a subnormal or to zero
        values = rng.integers(-9, 10, values.shape).astype(np.float32) * np.float32(2.0**-133)
    elif kind == "huge":
        values *= np.float32(1e6)
    elif kind == "mixed":
        values *= np.exp(rng.uniform(-80, 80, values.shape)).astype(np.float32)
    return from_float32(values)


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("kind", ["gauss", "tied", "zero", "tiny", "underflow", "huge", "mixed"])
def test_bytes_are_those_of_compressed_tensors(kind, group_size, assert_same_bytes):
    for seed in range(4):
        bits = _weight(kind, seed)
        codes, scale = quantize_absmax(bits, group_size=group_size)
        expected_codes, expected_scale = _oracle(bits, group_size)
        assert_same_bytes("scale", expected_scale, scale)
        assert_same_bytes("codes", expected_codes, codes)


def test_zero_group_has_the_scale_of_machine_epsilon():
    codes, scale = quantize_absmax(np.array([[0x0000, 0x8000] * 16], np.uint16), group_size=32)
    assert scale.tolist() == [[0x3C00]]
    assert not codes.any()
