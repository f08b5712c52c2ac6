#!/usr/bin/env python
"""KV cache bytes a token by the published formulas of other planners, beside the memory plan's.

The formulas are stated here in our own words; nothing of the other tools is run.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from quantkit.memory.gpus import DEFAULT_GPU, gpu_named
from quantkit.memory.kv_format import KvDtype
from quantkit.memory.make import make_memory_plan
from quantkit.memory.resolve import recipe_model
from quantkit.memory.serving import MemoryRequest
from quantkit.recipe_files import recipe_config

CASES = (
    ("glm-5", KvDtype.FP8),
    ("glm-5.2", KvDtype.FP8),
    ("glm-5.2", KvDtype.BF16),
    ("kimi-k2", KvDtype.BF16),
    ("kimi-k2", KvDtype.FP8),
)


def hf_mem(config: Mapping[str, Any], dtype: KvDtype) -> int:
    """2 x layers x KV heads x head size, as if every head kept a key and a value."""
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    num_bytes: int = 2 * config["num_hidden_layers"] * heads * head_dim * dtype.num_bytes
    return num_bytes


def aiconfigurator(config: Mapping[str, Any], dtype: KvDtype) -> int:
    """Latent and rope values, and with sparse attention a key of the indexer, on every layer alike.

    Its FP8 row of sparse attention has no scales: 512 codes and 128 bytes of rope.
    """
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    if "index_head_dim" not in config:
        row = (latent + rope) * dtype.num_bytes
    elif dtype is KvDtype.FP8:
        row = latent + 2 * rope + config["index_head_dim"] + 4
    else:
        row = (latent + rope) * 2 + config["index_head_dim"] + 4
    return int(config["num_hidden_layers"] * row)


def ours(recipe: str, dtype: KvDtype) -> int:
    """The memory plan's, on Hopper."""
    request = MemoryRequest(gpu=gpu_named(DEFAULT_GPU), kv_dtype=dtype)
    return int(make_memory_plan(recipe_model(recipe), request, with_advice=False).stages[0].cell.num_bytes)


def table() -> list[str]:
    """Markdown."""
    columns = ("model", "KV cache", "this planner", "hf-mem's formula", "aiconfigurator's formula")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for recipe, dtype in CASES:
        config, right = recipe_config(recipe), ours(recipe, dtype)
        whole, latent = hf_mem(config, dtype), aiconfigurator(config, dtype)
        lines.append(
            f"| `{recipe}` | {dtype.upper()} | {right:,} B | {whole:,} B ({whole / right:.1f} times) | "
            f"{latent:,} B ({(latent / right - 1) * 100:+.1f} %) |"
        )
    return lines


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.stdout.write("\n".join(table()) + "\n")
