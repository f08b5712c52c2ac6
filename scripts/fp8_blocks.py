"""FP8 block checkpoints of torch tensors, and any checkpoint read back as FP32, by torch and compressed-tensors.

None of our own decoders is used: what is measured here is what others would see.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = 128
E4M3_MAX = 448
INDEX_NAME = "model.safetensors.index.json"
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}


def encode_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and FP32 multipliers of blocks of 128 x 128; the blocks at the edges may be smaller."""
    rows, cols = weight.shape
    grid = (-(-rows // BLOCK), -(-cols // BLOCK))
    padded = torch.zeros(grid[0] * BLOCK, grid[1] * BLOCK)
    padded[:rows, :cols] = weight
    amax = padded.reshape(grid[0], BLOCK, grid[1], BLOCK).abs().amax((1, 3))
    scale = torch.where(amax > 0, amax / E4M3_MAX, 1.0)
    codes = (weight / spread(scale, rows, cols)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, scale


def spread(scale: Tensor, rows: int, cols: int) -> Tensor:
    """The multiplier of every element."""
    return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]


def write_fp8_checkpoint(
    directory: Path, tensors: Mapping[str, Tensor], fp8_names: Collection[str], config: Mapping[str, Any]
) -> None:
    """Two shards with their index, and config.json: FP8 where named, else BF16, and FP32 for what a router adds."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in fp8_names:
            stored[name], stored[name + "_scale_inv"] = encode_blocks(tensor.float())
        else:
            is_exact = name.endswith("e_score_correction_bias")
            stored[name] = tensor.to(torch.float32 if is_exact else torch.bfloat16).contiguous()
    directory.mkdir(parents=True, exist_ok=True)
    total = sum(tensor.nbytes for tensor in stored.values())
    shards: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    filled = 0
    for name, tensor in stored.items():
        shards[int(filled >= total / 2)][name] = tensor
        filled += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        shard_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / shard_name, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, shard_name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2))
    document = {**config, "dtype": "bfloat16", "quantization_config": QUANTIZATION}
    (directory / "config.json").write_text(json.dumps(document, indent=2))


def read_dense(directory: Path) -> dict[str, Tensor]:
    """Every weight of a checkpoint in FP32: FP8 blocks, packed INT4 or plain tensors."""
    stored, dense = _read_stored(directory), {}
    for name, tensor in stored.items():
        if name.endswith(".weight_packed"):
            dense[name.removesuffix("_packed")] = _unpacked(name.removesuffix(".weight_packed"), stored)
        elif tensor.dtype == torch.float8_e4m3fn:
            dense[name] = tensor.float() * spread(stored[name + "_scale_inv"].float(), *tensor.shape)
        elif not name.endswith(("_scale_inv", ".weight_scale", ".weight_shape", ".weight_zero_point")):
            dense[name] = tensor.float()
    return dense


def read_int4(directory: Path) -> dict[str, Tensor]:
    """The weights that are packed INT4, in FP32."""
    stored, packed = _read_stored(directory), ".weight_packed"
    modules = [name.removesuffix(packed) for name in stored if name.endswith(packed)]
    return {module + ".weight": _unpacked(module, stored) for module in modules}


def _read_stored(directory: Path) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = {}
    for path in sorted(directory.glob("model*.safetensors")):
        stored |= load_file(path)
    return stored


def _unpacked(module: str, stored: Mapping[str, Tensor]) -> Tensor:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    shape = torch.Size(stored[module + ".weight_shape"].tolist())
    codes = unpack_from_int32(stored[module + ".weight_packed"], 4, shape).float()
    scale = stored[module + ".weight_scale"].float()
    group_size = -(-shape[1] // scale.shape[1])
    values: Tensor = codes * scale.repeat_interleave(group_size, 1)[:, : shape[1]]
    return values


def load_model(directory: Path, weights: Mapping[str, Tensor] | None = None) -> Any:
    """The model of a checkpoint's config in FP32, with its weights as they are stored, or with others."""
    from transformers import AutoConfig, AutoModelForCausalLM

    document = json.loads((directory / "config.json").read_text())
    document.pop("quantization_config", None)
    config = AutoConfig.for_model(**(document | {"dtype": "float32"}))
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    found = dict(read_dense(directory) if weights is None else weights)
    return kind.from_pretrained(None, config=config, state_dict=found, dtype=torch.float32).eval()


def write_tokens(directory: Path, part: str, tokens: Tensor) -> None:
    """In a folder of its own: a checkpoint may hold no shard that its index does not name."""
    (directory / "text").mkdir(exist_ok=True)
    save_file({"input_ids": tokens.contiguous()}, directory / "text" / f"{part}.safetensors")


def read_tokens(directory: Path, part: str) -> Tensor:
    tokens: Tensor = load_file(directory / "text" / f"{part}.safetensors")["input_ids"]
    return tokens
