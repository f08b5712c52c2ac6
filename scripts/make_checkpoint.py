#!/usr/bin/env python
"""Make a GLM-5.2 FP8 checkpoint with real tensor names and random weights, of any size.

The default dimensions are small; ``--real`` gives those of GLM-5.2 (hidden 6144, experts 2048 wide), for benchmarks.
Weights are Gaussian, quantized to FP8 in 128 x 128 blocks. The same arguments give the same bytes.

    scripts/make_checkpoint.py /tmp/tiny
    scripts/make_checkpoint.py /tmp/bench --real --experts 44 --layers 1 --dense-layers 0 --shards 8
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from quantkit.checkpoint.writer import ShardWriter, order_tensors
from quantkit.families import FAMILIES
from quantkit.numerics import bfloat16
from quantkit.numerics.fp8 import decode_e4m3
from quantkit.tensors import BF16, F8_E4M3, TensorSpec
from quantkit.weights.source_form import source_form
from quantkit.weights.stored import stored_specs

BLOCK = 128
NUM_POOL_BLOCKS = 1024
SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "index_n_heads": 4,
    "vocab_size": 2048,
}
REAL = {
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "index_n_heads": 32,
    "vocab_size": 154880,
}


def glm_config(sizes: dict[str, int], *, experts: int, layers: int, dense_layers: int, mtp: bool) -> dict[str, Any]:
    """config.json of GLM-5.2 with other sizes; indexers on every fourth layer, as there."""
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "attention_bias": False,
        "first_k_dense_replace": dense_layers,
        "head_dim": 192,
        "hidden_act": "silu",
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "indexer_rope_interleave": True,
        "max_position_embeddings": 1048576,
        "n_group": 1,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": min(8, experts),
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": int(mtp),
        "qk_head_dim": 256,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 256,
        **sizes,
        "num_key_value_heads": sizes["num_attention_heads"],
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    }


class RandomWeights:
    """Random tensors from a pool of Gaussian FP8 blocks, so that gigabytes take seconds."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        values = self._random.standard_normal((NUM_POOL_BLOCKS, BLOCK, BLOCK), dtype=np.float32)
        values *= 448 / np.abs(values).max(axis=(1, 2), keepdims=True)
        self._pool = encode_e4m3(values)

    def fp8(self, rows: int, cols: int) -> NDArray[np.uint8]:
        """Codes [rows, cols]; every block has an element of the largest magnitude, 448."""
        grid = (-(-rows // BLOCK), -(-cols // BLOCK))
        blocks = self._pool[self._random.integers(NUM_POOL_BLOCKS, size=grid)]
        whole = blocks.transpose(0, 2, 1, 3).reshape(grid[0] * BLOCK, grid[1] * BLOCK)
        return np.ascontiguousarray(whole[:rows, :cols])

    def tensor(self, name: str, spec: TensorSpec) -> NDArray[Any]:
        """Any tensor of the checkpoint, by name and spec."""
        if spec.dtype == F8_E4M3:
            return self.fp8(*spec.shape)
        values = self._random.standard_normal(spec.shape, dtype=np.float32)
        if name.endswith("weight_scale_inv"):
            scale: NDArray[np.float32] = np.exp(0.1 * values) * np.float32(1.5e-4)
            return scale
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif name.endswith("e_score_correction_bias"):
            values = 34.5 + 0.1 * values
        else:
            values *= 0.02
        return bfloat16.from_float32(values) if spec.dtype == BF16 else values


def encode_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Nearest FP8 code; values of at most 448."""
    magnitudes = decode_e4m3(np.arange(127, dtype=np.uint8))
    codes: NDArray[np.uint8] = np.searchsorted((magnitudes[1:] + magnitudes[:-1]) / 2, np.abs(values)).astype(np.uint8)
    codes[np.signbit(values)] |= 0x80
    return codes


def make_checkpoint(directory: Path, config: dict[str, Any], *, num_shards: int, seed: int = 0) -> None:
    """Write config, tokenizer stand-ins, shards and index into a new directory."""
    directory.mkdir(parents=True)
    family = FAMILIES[config["model_type"]]
    specs = dict(stored_specs(family.assumed_tensors(config), source_form(config["quantization_config"])))
    total = sum(spec.num_bytes for spec in specs.values())
    shards: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        if filled >= total * len(shards) / num_shards and len(shards) < num_shards:
            shards.append({})
        shards[-1][name] = spec
        filled += spec.num_bytes
    weights = RandomWeights(seed)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        shard_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        writer = ShardWriter(directory / shard_name, order_tensors(shard))
        for name, spec in shard.items():
            writer.write(name, weights.tensor(name, spec))
            weight_map[name] = shard_name
        writer.close()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 1.0}))
    (directory / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--real", action="store_true", help="dimensions of GLM-5.2 instead of small ones")
    parser.add_argument("--experts", type=int, default=8, help="routed experts of each layer")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dense-layers", type=int, default=1, help="leading layers without experts")
    parser.add_argument("--mtp", action=argparse.BooleanOptionalAction, default=True, help="with an MTP layer")
    parser.add_argument("--vocab", type=int, help="vocabulary size")
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.directory.exists():
        parser.error(f"{arguments.directory} exists already")
    sizes = dict(REAL if arguments.real else SMALL)
    if arguments.vocab:
        sizes["vocab_size"] = arguments.vocab
    config = glm_config(
        sizes,
        experts=arguments.experts,
        layers=arguments.layers,
        dense_layers=arguments.dense_layers,
        mtp=arguments.mtp,
    )
    make_checkpoint(arguments.directory, config, num_shards=arguments.shards, seed=arguments.seed)
    num_bytes = sum(path.stat().st_size for path in arguments.directory.glob("*.safetensors"))
    print(f"{arguments.directory}: {num_bytes:,} bytes in {arguments.shards} shards")


if __name__ == "__main__":
    main()
