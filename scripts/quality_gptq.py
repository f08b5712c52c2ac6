#!/usr/bin/env python
"""GPTQ by llm-compressor, in a process of its own: it changes how transformers loads and runs a family's experts.

scripts/quality_gptq.py SOURCE DENSE OUTPUT GROUP_SIZE TARGET...
"""

import sys
from pathlib import Path
from typing import Any, cast

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.fp8_blocks import read_tokens


def int4_of(linear: Any) -> dict[str, Tensor]:
    """What llm-compressor leaves in a module in memory, whose weight lies on the grid already, as it is stored."""
    rows, cols = linear.weight.shape
    scale = linear.weight_scale.data
    steps = linear.weight.data.reshape(rows, scale.shape[1], -1) / scale[..., None]
    codes = steps.round().clamp(-8, 7)
    if (steps - codes).abs().max() > 0.01:
        raise SystemExit("a weight is off the grid of its scales")
    return {
        "weight_packed": pack_to_int32(codes.reshape(rows, cols).to(torch.int8), 4),
        "weight_scale": scale.to(torch.bfloat16),
        "weight_shape": torch.tensor([rows, cols]),
    }


def main() -> None:
    from llmcompressor.entrypoints.oneshot import oneshot
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from llmcompressor.modifiers.gptq import GPTQModifier
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    source, dense, output = map(Path, sys.argv[1:4])
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": int(sys.argv[4])}
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    linearize_moe(model)
    is_moe = model.config.model_type == "glm_moe_dsa"
    tokens = read_tokens(source, "calibration")
    rows: Any = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in tokens]
    oneshot(
        model=model,
        processor=cast(Any, object()),  # none is needed for tokens, and without one it looks for one
        dataset=DataLoader(rows, batch_size=None),
        recipe=GPTQModifier(config_groups={"group_0": {"targets": sys.argv[5:], "weights": weights}}),
        pipeline="sequential",
        sequential_targets=["GlmMoeDsaAttention", "GlmMoeDsaMoE"] if is_moe else None,
        num_calibration_samples=len(rows),
        max_seq_length=tokens.shape[1],
    )
    stored = load_file(dense / "model.safetensors")
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale"):
            del stored[name + ".weight"]
            stored |= {f"{name}.{leaf}": tensor for leaf, tensor in int4_of(module).items()}
    output.mkdir()
    save_file(stored, output / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
