#!/usr/bin/env python
"""INT4 by llm-compressor, in a process of its own: it changes how transformers loads and runs a family's experts.

scripts/quality_llmcompressor.py gptq|OBSERVER SOURCE DENSE OUTPUT GROUP_SIZE TARGET...
"""

import argparse
import sys
from pathlib import Path
from typing import Any, cast

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

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


def quantize_without_data(observer: str, dense: Path, output: Path, scheme: dict[str, Any]) -> None:
    """Shard by shard. Its trial on tensors without data may print a traceback; it goes on with the real ones."""
    from compressed_tensors.quantization import QuantizationScheme
    from llmcompressor.entrypoints.model_free import model_free_ptq

    scheme["weights"]["observer"] = observer
    model_free_ptq(dense, output, scheme=QuantizationScheme(**scheme), max_workers=1, device="cpu")


def quantize_by_gptq(dense: Path, output: Path, scheme: dict[str, Any], tokens: Tensor) -> None:
    """With its defaults, in FP32: layer by layer, on what the quantized layers before give."""
    from llmcompressor.entrypoints.oneshot import oneshot
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from llmcompressor.modifiers.gptq import GPTQModifier
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    linearize_moe(model)
    is_moe = model.config.model_type == "glm_moe_dsa"
    rows: Any = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in tokens]
    oneshot(
        model=model,
        processor=cast(Any, object()),  # none is needed for tokens, and without one it looks for one
        dataset=DataLoader(rows, batch_size=None),
        recipe=GPTQModifier(config_groups={"group_0": scheme}),
        pipeline="sequential",
        # a whole layer cannot be traced: its indexer decides by values
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method")
    for name in ("source", "dense", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("group_size", type=int)
    parser.add_argument("targets", nargs="*")
    asked = parser.parse_args()
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": asked.group_size}
    scheme = {"targets": asked.targets, "weights": weights}
    if asked.method == "gptq":
        quantize_by_gptq(asked.dense, asked.output, scheme, read_tokens(asked.source, "calibration"))
    else:
        quantize_without_data(asked.method, asked.dense, asked.output, scheme)


if __name__ == "__main__":
    main()
