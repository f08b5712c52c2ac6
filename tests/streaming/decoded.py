"""What the tensors of an output mean, by the definitions of their forms and the compressed-tensors library."""

from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

from tests.convert.helpers import load_output
from tests.tiny import BLOCK, expand

FP8 = torch.float8_e4m3fn


def decoded_output(directory: Path) -> dict[str, torch.Tensor]:
    """float32 weights by logical name: INT4 of compressed-tensors or w4afp8, FP8 blocks, or as stored."""
    stored = load_output(directory)
    decoded = {}
    for name, tensor in stored.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight_packed":
            decoded[f"{module}.weight"] = _packed(stored, module)
        elif leaf == "weight" and tensor.dtype == torch.int8:
            codes = torch.stack(((tensor << 4) >> 4, tensor >> 4), -1).reshape(len(tensor), -1)
            decoded[name] = codes.float() * _wide(stored[f"{module}.weight_scale_inv"], codes)
        elif leaf == "weight" and tensor.dtype == FP8:
            scale = next(
                stored[f"{module}.{one}"] for one in ("weight_scale", "weight_scale_inv") if f"{module}.{one}" in stored
            )
            decoded[name] = tensor.float() * expand(scale.float(), *tensor.shape, (BLOCK, BLOCK))
        elif tensor.is_floating_point() and "weight_scale" not in leaf:
            decoded[name] = tensor.float()
    return decoded


def _packed(stored: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    shape = torch.Size(stored[f"{module}.weight_shape"].tolist())
    codes = unpack_from_int32(stored[f"{module}.weight_packed"], 4, shape).float()
    scale = stored[f"{module}.weight_scale"]
    if f"{module}.weight_zero_point" in stored:
        zero = unpack_from_int32(stored[f"{module}.weight_zero_point"], 4, scale.shape, packed_dim=0)
        codes -= _wide(zero, codes)
    return codes * _wide(scale, codes)


def _wide(groups: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return groups.float().repeat_interleave(like.shape[1] // groups.shape[1], 1)
