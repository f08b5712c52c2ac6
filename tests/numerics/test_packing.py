import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from quantkit.numerics import bfloat16, zero_points
from quantkit.numerics.grid import value_grid
from quantkit.numerics.packing import pack_int4, pack_rows_int4, unpack_int4, unpack_rows_int4


def test_codes_in_order_are_these_words():
    packed = pack_int4(np.arange(-8, 8, dtype=np.int8)[None])
    assert packed.view(np.uint32).tolist() == [[0x76543210, 0xFEDCBA98]]
    assert packed.astype("<i4").tobytes().hex(" ") == "10 32 54 76 98 ba dc fe"


def test_padding_nibbles_are_zero():
    packed = pack_int4(np.zeros((1, 10), np.int8))
    assert packed.view(np.uint32).tolist() == [[0x88888888, 0x00000088]]


@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (5, 37), (16, 256), (2, 0), (0, 8)])
def test_words_are_those_of_compressed_tensors(shape, assert_same_bytes):
    codes = np.random.default_rng(0).integers(-8, 8, shape).astype(np.int8)
    packed = pack_int4(codes)
    assert_same_bytes("round trip", codes, np.ascontiguousarray(unpack_int4(packed, shape[1])))
    if codes.size:
        assert_same_bytes("packed", pack_to_int32(torch.from_numpy(codes), 4).numpy(), packed)
        foreign = unpack_from_int32(torch.from_numpy(packed), 4, torch.Size(shape)).numpy()
        assert_same_bytes("unpacked", codes, np.ascontiguousarray(foreign))


def test_zero_points_in_order_are_these_words():
    packed = pack_rows_int4(np.arange(-8, 8, dtype=np.int8)[:, None])
    assert packed.view(np.uint32).tolist() == [[0x76543210], [0xFEDCBA98]]
    packed = pack_rows_int4(np.zeros((10, 2), np.int8))
    assert packed.view(np.uint32).tolist() == [[0x88888888] * 2, [0x00000088] * 2]


@pytest.mark.parametrize("shape", [(1, 1), (8, 3), (37, 5), (256, 16), (2, 0), (0, 8)])
def test_words_of_zero_points_are_those_of_compressed_tensors(shape, assert_same_bytes):
    zero = np.random.default_rng(0).integers(-8, 8, shape).astype(np.int8)
    packed = pack_rows_int4(zero)
    assert packed.flags.c_contiguous
    assert_same_bytes("round trip", zero, unpack_rows_int4(packed, shape[0]))
    if zero.size:
        foreign = pack_to_int32(torch.from_numpy(zero), 4, packed_dim=0).contiguous().numpy()
        assert_same_bytes("packed", foreign, packed)
        unpacked = unpack_from_int32(torch.from_numpy(packed), 4, torch.Size(shape), packed_dim=0).numpy()
        assert_same_bytes("unpacked", zero, np.ascontiguousarray(unpacked))


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("num_rows", [1, 12, 32])
def test_compressed_tensors_decodes_code_less_zero_times_scale(num_rows, group_size, assert_same_bytes):
    """And compresses what it decoded to the same words."""
    rng = np.random.default_rng(1)
    values = (rng.standard_normal((num_rows, 384)) + rng.standard_normal((num_rows, 1))).astype(np.float32)
    codes, scale, zero = zero_points.quantize_search(*value_grid(values, group_size=group_size), group_size=group_size)
    assert len(set(zero.reshape(-1).tolist())) > 1
    args = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=group_size)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    stored = {
        "weight_packed": torch.from_numpy(pack_int4(codes)),
        "weight_scale": torch.from_numpy(scale).view(torch.bfloat16),
        "weight_zero_point": torch.from_numpy(pack_rows_int4(zero)),
        "weight_shape": torch.tensor(codes.shape),
    }
    decoded = PackedQuantizationCompressor.decompress(stored, scheme)
    levels = (codes - zero.repeat(group_size, 1)).astype(np.float32)
    expected = bfloat16.from_float32(levels * bfloat16.to_float32(scale).repeat(group_size, 1))
    assert_same_bytes("decoded", expected, decoded["weight"].view(torch.uint16).numpy())
    again = PackedQuantizationCompressor.compress(decoded, scheme)
    for name in ("weight_packed", "weight_zero_point"):
        assert_same_bytes(name, stored[name].numpy(), again[name].numpy())
