import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams

from quantkit.numerics.bfloat16 import from_float32
from quantkit.numerics.min_max import quantize_min_max


def _oracle(bits, group_size):
    weight = torch.from_numpy(bits).view(torch.bfloat16)
    args = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=group_size)
    groups = weight.unflatten(-1, (-1, group_size))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    codes = quantize(weight, scale, zero_point, args, dtype=torch.int8)
    return codes.numpy(), scale.view(torch.uint16).numpy(), zero_point.numpy()


def _weight(kind, seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((24, 512)).astype(np.float32)
    values += rng.standard_normal((24, 16)).repeat(32, 1).astype(np.float32)
    if kind == "tied":  # quotients, and zero points, that fall on halves
        values = np.float32(0.5) * rng.integers(-15, 16, values.shape).astype(np.float32)
        values[:, ::32], values[:, 1::32] = 7.5, -7.5
    elif kind == "one sign":
        values = np.abs(values) * np.sign(rng.standard_normal((24, 16))).repeat(32, 1).astype(np.float32)
    elif kind == "one value":
        values[:] = rng.standard_normal((24, 1))
    elif kind == "outlier":
        values[:, ::128] *= 1000
    elif kind == "zero":
        values[rng.random((24, 16)).repeat(32, 1) < 0.5] = rng.choice([0.0, -0.0])
    elif kind == "tiny":
        values *= np.float32(1e-40)
    elif kind == "underflow":  # the scale rounds to a subnormal or to zero
        values = rng.integers(-1, 2, values.shape).astype(np.float32) * np.float32(2.0**-133)
        values[:, :128] = np.abs(values[:, :128])
        values[:, 128:256] = rng.integers(-9, 10, (24, 128)) * 2.0**-133
    elif kind == "huge":
        values *= np.float32(1e6)
    elif kind == "beyond":  # the range, and so the scale, is infinite
        values = np.float32(3e38) * np.sign(values)
    elif kind == "mixed":
        values *= np.exp(rng.uniform(-80, 80, values.shape)).astype(np.float32)
    return from_float32(values)


KINDS = ("gauss", "tied", "one sign", "one value", "outlier", "zero", "tiny", "underflow", "huge", "beyond", "mixed")


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_compressed_tensors(kind, group_size, assert_same_bytes):
    for seed in range(4):
        bits = _weight(kind, seed)
        for label, expected, got in zip(
            ("codes", "scale", "zero"),
            _oracle(bits, group_size),
            quantize_min_max(bits, group_size=group_size),
            strict=True,
        ):
            assert_same_bytes(label, expected, got)


def test_zero_group_has_the_scale_of_machine_epsilon():
    codes, scale, zero = quantize_min_max(np.array([[0x0000, 0x8000] * 16], np.uint16), group_size=32)
    assert scale.tolist() == [[0x3C00]]
    assert not codes.any()
    assert not zero.any()
