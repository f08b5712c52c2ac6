"""Stored weights as float32 torch tensors, whatever the format: the exact product of code and scale.

Legend: R rows, C columns, G groups along C.
"""

from typing import cast

import numpy as np
import torch
from torch import Tensor

from quantkit.codecs.fp8_block import Fp8Block
from quantkit.codecs.opaque import NativeInt4, Opaque
from quantkit.numerics import bfloat16
from quantkit.numerics.packing import Int4Words
from quantkit.transcode import Rows, has_row_blocks, read_rows, read_words
from quantkit.weights.weight import Weight

_NIBBLES = torch.arange(0, 32, 4, dtype=torch.int32)


def decode_weight(weight: Weight) -> Tensor:
    """The whole weight in its shape. Raises SourceError for NaN codes and scales that cannot be meant."""
    return decode_rows(weight, 0, weight.num_rows).reshape(weight.shape)


def is_known(weight: Weight) -> bool:
    """Whether its form is decoded."""
    return not isinstance(weight.codec, Opaque) or isinstance(weight.codec, NativeInt4)


def check_known(weight: Weight) -> None:
    """Raise SourceError for a form that is not decoded."""
    if not is_known(weight):
        weight.fail(f"is {weight.stored.spec}, not a weight", remedy="this form of checkpoint is unknown")


def decode_rows(weight: Weight, first: int, last: int) -> Tensor:
    """float32 [R, C] of rows ``[first, last)``."""
    if isinstance(weight.codec, NativeInt4):
        if not has_row_blocks(weight.codec):
            return _int4_values(weight, read_words(weight, 0, weight.num_rows, signed=True))[first:last]
        begin = first - first % 8  # zero points of eight rows share a word
        end = min(-(-last // 8) * 8, weight.num_rows)
        return _int4_values(weight, read_words(weight, begin, end, signed=True))[first - begin : last - begin]
    check_known(weight)
    rows = read_rows(weight, first, last)
    if isinstance(weight.codec, Fp8Block):
        return _fp8_values(rows, weight.codec)
    return torch.from_numpy(weight.codec.decode(rows.parts, first))


def _fp8_values(rows: Rows, codec: Fp8Block) -> Tensor:
    values_RC = torch.from_numpy(rows.parts["codes"]).view(torch.float8_e4m3fn).float()
    scale_BB = torch.from_numpy(np.ascontiguousarray(rows.parts["scale"]))
    num_rows, num_cols = values_RC.shape
    block_rows = (codec.row_offset + rows.first_row + torch.arange(num_rows)) // codec.block_rows
    if codec.block_cols >= num_cols:
        return values_RC.mul_(scale_BB[block_rows, :1])
    for block in torch.unique(block_rows).tolist():
        scale_C = scale_BB[block].repeat_interleave(codec.block_cols)[:num_cols]
        of_block = torch.nonzero(block_rows == block)
        values_RC[int(of_block[0]) : int(of_block[-1]) + 1] *= scale_C
    return values_RC


def _int4_values(weight: Weight, words: Int4Words) -> Tensor:
    codec = cast(NativeInt4, weight.codec)
    packed_RW = torch.from_numpy(np.ascontiguousarray(words.packed))
    nibbles_RW8 = (packed_RW.unsqueeze(-1) >> _NIBBLES) & 15
    codes_RC = (nibbles_RW8 - 8).float().reshape(len(packed_RW), -1)[:, : weight.num_cols]
    codes_RGS = codes_RC.reshape(len(codes_RC), -1, codec.group_size)
    if words.zero is not None:
        codes_RGS = codes_RGS - torch.from_numpy(words.zero).float().unsqueeze(-1)
    is_bf16 = words.scale.dtype == np.uint16
    scale_RG = bfloat16.to_float32(words.scale) if is_bf16 else words.scale.astype(np.float32)
    return (codes_RGS * torch.from_numpy(scale_RG).unsqueeze(-1)).reshape(codes_RC.shape)
