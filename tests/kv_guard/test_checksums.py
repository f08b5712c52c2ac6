"""Sums of pages: the published check value, the library's, and torch's are one."""

import pytest
import torch

from quantkit.kv_guard.checksums import PageChecksums, sums_by_library, sums_by_torch

CHECK = 0xE306_9283  # crc32c of "123456789", as the catalogue of polynomials has it


def layer_of(*pages):
    return torch.tensor([list(page) for page in pages], dtype=torch.uint8)


@pytest.mark.parametrize("sums", [sums_by_library, sums_by_torch])
def test_the_check_value(sums):
    assert sums([layer_of(b"123456789", b"987654321")], torch.tensor([0])).tolist() == [CHECK]
    assert sums([layer_of(b"1234"), layer_of(b"56789")], torch.tensor([0])).tolist() == [CHECK], "layer after layer"
    assert sums([layer_of(bytes(32))], torch.tensor([0])).tolist() == [0x8A91_36AA]  # 32 zeros: iSCSI, RFC 3720 B.4
    assert sums([layer_of(b"\xff" * 32)], torch.tensor([0])).tolist() == [0x62A8_AB43]


@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [(torch.uint8, [(5, 7)]), (torch.bfloat16, [(9, 4, 3), (9, 1)]), (torch.float8_e4m3fn, [(4, 656)] * 3)],
)
def test_torch_and_the_library_agree(dtype, shapes):
    generator = torch.Generator().manual_seed(4)
    num_bytes = torch.empty(0, dtype=dtype).element_size()
    layers = [
        torch.randint(0, 256, (*shape[:-1], shape[-1] * num_bytes), dtype=torch.uint8, generator=generator).view(dtype)
        for shape in shapes
    ]
    raw = [layer.view(torch.uint8).reshape(len(layer), -1) for layer in layers]
    pages = torch.tensor([3, 0, 3, 1])
    wanted = sums_by_library(raw, pages)
    assert torch.equal(sums_by_torch(raw, pages), wanted)
    assert torch.equal(PageChecksums(layers).of(pages), wanted)
    assert len(set(wanted.tolist())) == 3


def test_every_single_bit_counts():
    page = torch.randint(0, 256, (1, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    flipped = page.repeat(24 * 8, 1)
    for bit in range(24 * 8):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    sums = sums_by_torch([torch.cat((page, flipped))], torch.arange(24 * 8 + 1)).tolist()
    assert len(set(sums)) == 24 * 8 + 1
