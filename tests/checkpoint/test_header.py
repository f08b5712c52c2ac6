"""Headers are untrusted: every way of being wrong is a SourceError that names the file, and right ones are read."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quantkit.checkpoint.header import encode_header, header_end, parse_header, read_header
from quantkit.checkpoint.reader import read_tensor
from quantkit.checkpoint.writer import METADATA, ShardWriter, order_tensors
from quantkit.errors import SourceError
from quantkit.tensors import BF16, DTYPES, F32, I32, I64, TensorSpec


def write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin, end, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "num_data_bytes", "message"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "overlaps a"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, 4, "overlaps a"),
        ({"a": entry(0, 4), "b": entry(6, 8)}, 8, "hole of 2 bytes"),
        ({"a": entry(1, 4)}, 4, "hole of 1 bytes"),
        ({"a": entry(0, 4)}, 3, "truncated"),
        ({"a": entry(0, 4)}, 5, "1 bytes behind"),
        ({"a": entry(0, 4, [5])}, 4, "needs 5 bytes"),
        ({"a": entry(0, 4, [2, 2], "F32")}, 4, "needs 16 bytes"),
        ({"a": entry(0, 4, [-4])}, 4, "shape"),
        ({"a": entry(0, 4, [True, 4])}, 4, "shape"),
        ({"a": entry(0, 4, [4.0])}, 4, "shape"),
        ({"a": entry(0, 4, "4")}, 4, "shape"),
        ({"a": entry(4, 0, [4])}, 4, "needs 4 bytes"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, 1, "data_offsets"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 2**64]}}, 1, "data_offsets"),
        ({"a": {"dtype": "U8", "shape": [1]}}, 1, "entry"),
        ({"a": entry(0, 1) | {"extra": 1}}, 1, "entry"),
        ({"a": 3}, 0, "entry"),
        ({"a": entry(0, 1, dtype="F4")}, 1, "not supported"),
        ({"a": entry(0, 1, dtype=["U8"])}, 1, "not supported"),
        ({"__metadata__": {"a": 1}}, 0, "map of strings"),
        ({"__metadata__": []}, 0, "map of strings"),
        ([], 0, "not a JSON object"),
        (b"{", 0, "not JSON"),
        (b"", 0, "not JSON"),
        (b"\xff\xfe", 0, "not JSON"),
        (b"[" * 100_000, 0, "not JSON"),
        (
            b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
            0,
            "twice",
        ),
        (b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 0, "UTF-8"),
    ],
)
def test_lying_headers(header, num_data_bytes, message, tmp_path):
    path = write(tmp_path / "x.safetensors", header, bytes(num_data_bytes))
    with pytest.raises(SourceError, match=message) as caught:
        read_header(path)
    assert caught.value.file == "x.safetensors"
    assert caught.value.remedy


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 2**63), struct.pack("<Q", 10) + b"{}"])
def test_lengths_that_cannot_be(content, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(SourceError):
        read_header(path)


def test_header_of_more_than_100_megabytes_is_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", 100_000_001))
        stream.truncate(100_000_001 + 8)
    with pytest.raises(SourceError, match="more than the 100000000"):
        read_header(path)


def test_a_header_is_parsed_from_the_first_bytes_of_a_file_that_is_not_here(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": entry(0, 4)}, bytes(4))
    content, elsewhere = path.read_bytes(), path.with_name("elsewhere")
    end = header_end(content[:8], elsewhere, len(content))
    assert end == len(content) - 4
    header = parse_header(content[:end], elsewhere, len(content))
    assert [(one.name, one.spec, one.begin) for one in header.tensors] == [("a", TensorSpec(DTYPES["U8"], (4,)), end)]
    assert header == parse_header(content, elsewhere, len(content))
    with pytest.raises(SourceError, match="ends inside its header"):
        parse_header(content[: end - 1], elsewhere, len(content))
    with pytest.raises(SourceError, match="truncated"):
        parse_header(content, elsewhere, len(content) - 1)


def test_files_of_the_safetensors_library_are_read(tmp_path):
    tensors = {
        "a": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "b": torch.tensor(1.5),
        "c": torch.randn(3, 4).to(torch.float8_e4m3fn),
        "d": torch.randn(5).to(torch.bfloat16),
        "e": torch.empty(0, 7),
        "f": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    assert {tensor.name for tensor in header.tensors} == set(tensors)
    for stored in header.tensors:
        array = read_tensor(stored)
        assert array.shape == tuple(tensors[stored.name].shape)
        expected = tensors[stored.name].contiguous()
        assert array.tobytes() == (
            expected.reshape(-1).view(torch.uint8).numpy().tobytes() if expected.numel() else b""
        )


def test_bytes_of_a_small_file(tmp_path):
    specs = order_tensors({"s": TensorSpec(BF16, (1, 2)), "p": TensorSpec(I32, (1, 1)), "n": TensorSpec(I64, (2,))})
    writer = ShardWriter(tmp_path / "x.safetensors", specs)
    writer.write("p", np.array([[0x76543210]], np.int32))
    writer.write("n", np.array([1, 8], np.int64))
    writer.write("s", np.array([0x4000], np.uint16), first_byte=2)
    writer.write("s", np.array([0x3F80], np.uint16))
    writer.close()
    header = (
        b'{"__metadata__":{"format":"pt"},"n":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},'
        b'"p":{"dtype":"I32","shape":[1,1],"data_offsets":[16,20]},"s":{"dtype":"BF16","shape":[1,2],"data_offsets":[20,24]}}'
    )
    header += b" " * (-len(header) % 8)
    data = bytes.fromhex("0100000000000000 0800000000000000 10325476 803f 0040")
    assert (tmp_path / "x.safetensors").read_bytes() == len(header).to_bytes(8, "little") + header + data
    assert writer.file_bytes == 8 + len(header) + len(data)
    with safe_open(tmp_path / "x.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert opened.get_tensor("s").tolist() == [[1.0, 2.0]]


def test_incomplete_file_is_a_bug(tmp_path):
    writer = ShardWriter(tmp_path / "x.safetensors", {"a": TensorSpec(F32, (2,))})
    with pytest.raises(AssertionError, match="of 8 bytes"):
        writer.close()
    writer.write("a", np.ones(1, np.float32))
    with pytest.raises(AssertionError, match="written twice"):
        writer.write("a", np.ones(1, np.float32), first_byte=2)
    with pytest.raises(AssertionError, match="of 8 bytes"):
        writer.close()
    writer.abort()


def test_dtype_table_agrees_with_torch():
    names = {
        **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
        **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
        **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool},
        **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    }
    assert {name: dtype.num_bytes for name, dtype in DTYPES.items()} == {
        name: dtype.itemsize for name, dtype in names.items()
    }


def test_header_length_is_a_multiple_of_eight():
    for length in range(1, 20):
        assert len(encode_header({"x" * length: TensorSpec(F32, ())}, METADATA)) % 8 == 0
