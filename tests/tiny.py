"""A small checkpoint of two layers, written with the safetensors library and torch: nothing of ours writes it.

Hidden 256, one dense and one MoE layer with four experts (and an MTP layer on request), two shards; by default a
weight and its scale lie in different shards.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quantkit.families import FAMILIES

HIDDEN, WIDTH, EXPERTS = 256, 128, 4
BLOCK = 128
FP8 = torch.float8_e4m3fn

_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 512,
    "attention_bias": False,
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
# None: a key that the family does not have
_FAMILIES: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        **_MLA,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 16,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "head_dim": 64,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], **_MLA, "num_nextn_predict_layers": 0},
    "kimi_k2": {"architectures": ["DeepseekV3ForCausalLM"], **_MLA, "num_nextn_predict_layers": 0},
    "glm4_moe_lite": {"architectures": ["Glm4MoeLiteForCausalLM"], **_MLA, "num_nextn_predict_layers": 0},
    "deepseek_v32": {
        "architectures": ["DeepseekV32ForCausalLM"],
        **_MLA,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 16,
        "num_nextn_predict_layers": 0,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 64,
        "num_key_value_heads": 2,
        "num_experts": EXPERTS,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
        **dict.fromkeys(("first_k_dense_replace", "moe_layer_freq", "n_routed_experts", "n_shared_experts")),
    },
}
MODEL_TYPES = tuple(_FAMILIES)

_VISION = {
    "vt_hidden_size": 32,
    "vt_intermediate_size": 64,
    "vt_num_hidden_layers": 1,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "patch_size": 2,
    "merge_kernel_size": [2, 2],
    "mm_hidden_size": 32,
    "text_hidden_size": HIDDEN,
}


def tiny_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model of a family, without a quantization section."""
    if model_type == "kimi_k25":
        text = tiny_config("kimi_k2", **changes)
        names = ["KimiK25ForConditionalGeneration"]
        return {"model_type": model_type, "architectures": names, "text_config": text, "vision_config": _VISION}
    keys = {key: value for key, value in (_COMMON | _FAMILIES[model_type]).items() if value is not None}
    return {"model_type": model_type, "dtype": "bfloat16", **keys, **changes}


@dataclass
class TinyCheckpoint:
    """A checkpoint on disk. ``decoded``: the float32 value of every logical weight, by torch's own arithmetic."""

    directory: Path
    config: dict[str, Any]
    decoded: dict[str, torch.Tensor] = field(default_factory=dict)
    shards: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def tensor(self, name: str) -> torch.Tensor:
        """A stored tensor, from whatever shard; change it in place and call ``write``."""
        return next(tensors[name] for tensors in self.shards.values() if name in tensors)

    def shard_of(self, name: str) -> str:
        return next(shard for shard, tensors in self.shards.items() if name in tensors)

    def put(self, name: str, tensor: torch.Tensor, shard: str | None = None) -> None:
        """Add or replace a stored tensor."""
        target = shard or (
            self.shard_of(name) if any(name in one for one in self.shards.values()) else next(iter(self.shards))
        )
        self.shards[target][name] = tensor

    def remove(self, name: str) -> torch.Tensor:
        return self.shards[self.shard_of(name)].pop(name)

    def write(self, *, metadata: Mapping[str, str] | None = None, with_index: bool = True) -> None:
        """Write shards, index and config as they now are."""
        self.directory.mkdir(parents=True, exist_ok=True)
        weight_map = {}
        for shard, tensors in self.shards.items():
            given = {"format": "pt"} if metadata is None else dict(metadata)
            save_file(
                {name: one.contiguous() for name, one in tensors.items()},
                self.directory / shard,
                given or None,
            )
            weight_map |= dict.fromkeys(tensors, shard)
        total = sum(one.numel() * one.element_size() for tensors in self.shards.values() for one in tensors.values())
        if with_index:
            self.write_index({"metadata": {"total_size": total}, "weight_map": weight_map})
        self.write_config()

    def write_index(self, index: Mapping[str, Any]) -> None:
        (self.directory / "model.safetensors.index.json").write_text(json.dumps(index))

    def write_config(self) -> None:
        (self.directory / "config.json").write_text(json.dumps(self.config))


def quantize_fp8_blocks(
    weight: torch.Tensor, block: tuple[int, int] = (BLOCK, BLOCK)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and float32 multipliers of ceil blocks, in torch."""
    rows, cols = weight.shape
    grid = (-(-rows // block[0]), -(-cols // block[1]))
    scale = torch.ones(grid)
    for row in range(grid[0]):
        for col in range(grid[1]):
            part = weight[row * block[0] : (row + 1) * block[0], col * block[1] : (col + 1) * block[1]]
            if part.abs().max() > 0:
                scale[row, col] = part.abs().max() / 448
    return (weight / expand(scale, rows, cols, block)).clamp(-448, 448).to(FP8), scale


def expand(scale: torch.Tensor, rows: int, cols: int, block: tuple[int, int] = (BLOCK, BLOCK)) -> torch.Tensor:
    """A scale grid at the size of the weight."""
    return scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :cols]


def write_checkpoint(
    directory: Path,
    *,
    model_type: str = "glm_moe_dsa",
    source_format: str = "fp8_block",
    num_shards: int = 2,
    seed: int = 0,
    cross_shard: bool = True,
    scale_only_shard: bool = False,
    scale_suffix: str = "weight_scale_inv",
    scale_dtype: torch.dtype = torch.float32,
    fused_experts: bool = False,
    prefix: str | None = None,
    mtp: bool = False,
    config_changes: Mapping[str, Any] | None = None,
    write: bool = True,
) -> TinyCheckpoint:
    """A checkpoint with the switches named; ``source_format``: fp8_block, fp8_channel, fp8_tensor, modelopt, bf16,
    f16, f32, int4_native."""
    config = tiny_config(model_type, **(config_changes or {}))
    text = config.get("text_config", config)
    if mtp:
        text["num_nextn_predict_layers"] = 1
    text |= _quantization(source_format)  # where the published checkpoints keep it
    family = FAMILIES["deepseek_v3" if model_type == "kimi_k2" else model_type]
    generator = torch.Generator().manual_seed(seed)
    checkpoint = TinyCheckpoint(directory, config)
    stored: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    root = f"{prefix}" if prefix is not None else None
    for expected in family.expected_tensors(config, root=root):
        if expected.optional and not mtp:
            continue
        weight = torch.randn(expected.shape, generator=generator) * 0.02
        if expected.name.endswith("e_score_correction_bias"):
            weight = 34.5 + weight
        is_packed = source_format == "int4_native" and expected.role == "routed_expert"
        is_fp8 = expected.is_fp8 and (source_format.startswith("fp8") or source_format == "modelopt")
        if is_packed:
            stored |= _packed(expected.name, weight, checkpoint)
        elif is_fp8:
            codes, scale, block = _fp8(weight, source_format, scale_dtype)
            stored[expected.name] = codes
            scales[expected.name.removesuffix(".weight") + "." + scale_suffix] = scale
            checkpoint.decoded[expected.name] = codes.float() * _as_grid(scale, expected.shape, block)
        else:
            dtype = torch.float32 if expected.dtype.name == "F32" or source_format == "f32" else torch.bfloat16
            dtype = torch.float16 if source_format == "f16" and dtype == torch.bfloat16 else dtype
            stored[expected.name] = weight.to(dtype)
            checkpoint.decoded[expected.name] = stored[expected.name].float()
    if fused_experts:
        stored, scales = _fuse(stored, scales, scale_suffix)
    checkpoint.shards = _deal(stored, scales, num_shards, cross_shard=cross_shard, scale_only=scale_only_shard)
    if write:
        checkpoint.write()
    return checkpoint


def _quantization(source_format: str) -> dict[str, Any]:
    if source_format == "fp8_block":
        section: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    elif source_format == "modelopt":
        section = {"quant_method": "modelopt", "quant_algo": "FP8"}
    elif source_format in {"fp8_channel", "fp8_tensor"}:
        weights = {
            "num_bits": 8,
            "type": "float",
            "strategy": source_format[4:],
            "symmetric": True,
            "dynamic": False,
        }
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        section = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": groups,
            "ignore": ["lm_head"],
        }
    elif source_format == "int4_native":
        weights = {
            "num_bits": 4,
            "type": "int",
            "strategy": "group",
            "group_size": 32,
            "symmetric": True,
            "dynamic": False,
        }
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
        ignore = [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ]
        section = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": groups,
            "ignore": ignore,
        }
    else:
        return {}
    return {"quantization_config": section}


def _fp8(
    weight: torch.Tensor, source_format: str, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    rows, cols = weight.shape
    block = {"fp8_channel": (1, cols), "fp8_tensor": (rows, cols), "modelopt": (rows, cols)}.get(
        source_format, (BLOCK, BLOCK)
    )
    _, scale = quantize_fp8_blocks(weight, block)
    if scale_dtype == torch.float8_e8m0fnu:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    rounded = scale.to(scale_dtype)
    codes = (weight / expand(rounded.float(), rows, cols, block)).clamp(-448, 448).to(FP8)
    if source_format == "modelopt":
        rounded = rounded.reshape(())
    elif source_format == "fp8_tensor":
        rounded = rounded.reshape(1)
    return codes, rounded, block


def _as_grid(scale: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> torch.Tensor:
    rows, cols = shape
    return expand(scale.float().reshape(-(-rows // block[0]), -(-cols // block[1])), rows, cols, block)


def _packed(name: str, weight: torch.Tensor, checkpoint: TinyCheckpoint) -> dict[str, torch.Tensor]:
    """Kimi's own INT4: scale = maximum / 7, codes -7 to 7, groups of 32; packed by the compressed-tensors library."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    rows, cols = weight.shape
    groups = weight.reshape(rows, -1, 32)
    scale = (groups.abs().amax(-1) / 7).to(torch.bfloat16)
    codes = torch.round(groups / scale.float().unsqueeze(-1)).clamp(-7, 7).to(torch.int8).reshape(rows, cols)
    checkpoint.decoded[name] = (codes.reshape(rows, -1, 32) * scale.float().unsqueeze(-1)).reshape(rows, cols)
    module = name.removesuffix(".weight")
    return {
        f"{module}.weight_packed": pack_to_int32(codes, 4),
        f"{module}.weight_scale": scale,
        f"{module}.weight_shape": torch.tensor([rows, cols], dtype=torch.int32),
    }


def _fuse(
    stored: dict[str, torch.Tensor], scales: dict[str, torch.Tensor], suffix: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Experts of a layer as 3-D tensors [expert, out, in], gate above up, the way transformers names them."""
    parents = sorted({name.split(".experts.")[0] for name in stored if ".experts." in name})
    for parent in parents:
        for leaf, projections in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            for table, part, joined in (
                (stored, "weight", ""),
                (scales, suffix, "_" + suffix.removeprefix("weight_")),
            ):
                names = [[f"{parent}.experts.{e}.{one}.{part}" for one in projections] for e in range(EXPERTS)]
                if names[0][0] in table:
                    dtype = table[names[0][0]].dtype
                    width = torch.uint8 if dtype.itemsize == 1 else dtype  # torch cannot join FP8
                    whole = [torch.cat([table.pop(name).view(width) for name in row]) for row in names]
                    table[f"{parent}.experts.{leaf}{joined}"] = torch.stack(whole).view(dtype)
    return stored, scales


def _deal(
    stored: dict[str, torch.Tensor],
    scales: dict[str, torch.Tensor],
    num_shards: int,
    *,
    cross_shard: bool,
    scale_only: bool,
) -> dict[str, dict[str, torch.Tensor]]:
    total = num_shards + int(scale_only)
    names = [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
    shards: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names}
    for position, (name, tensor) in enumerate(stored.items()):
        shards[names[position * num_shards // len(stored)]][name] = tensor
    for scale_name, tensor in scales.items():
        stem = scale_name.rsplit(".", 1)[0]
        owner = next(
            index
            for index, shard in enumerate(names)
            if stem + ".weight" in shards[shard]
            or any(scale_name.startswith(n) for n in shards[shard] if ".experts." in n)
        )
        if scale_only:
            shards[names[-1]][scale_name] = tensor
        else:
            shards[names[(owner + int(cross_shard)) % num_shards]][scale_name] = tensor
    return shards
