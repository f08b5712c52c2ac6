import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from quantkit.numerics.packing import pack_int4, unpack_int4


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
