"""Tiny checkpoints that behave like models, and transformers' own forward over their decoded weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.tiny import EXPERTS, TinyCheckpoint, write_checkpoint

CLASSES = {
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "kimi_k2": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "kimi_k25": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


def lively_checkpoint(directory: Path, model_type: str, **switches: Any) -> TinyCheckpoint:
    """With norm gains around one and a router that tells tokens apart, so that every weight matters."""
    tiny = write_checkpoint(directory, model_type=model_type, write=False, **switches)
    generator = torch.Generator().manual_seed(1)
    for name, value in list(tiny.decoded.items()):
        if "norm" in name and name.endswith("weight"):
            tiny.put(name, (1 + 0.3 * torch.randn(value.shape, generator=generator)).to(torch.bfloat16))
        elif name.endswith(("mlp.gate.weight", "embed_tokens.weight")):
            tiny.put(name, (value * 40).to(torch.bfloat16))
        elif name.endswith("e_score_correction_bias"):
            tiny.put(name, value - 34.5)
        else:
            continue
        tiny.decoded[name] = tiny.tensor(name).float()
    tiny.write()
    return tiny


def whole_model(tiny: TinyCheckpoint, model_type: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' class, its weights taken from ``decoded`` by this function alone."""
    config = tiny.config.get("text_config", tiny.config)
    config_class, model_class = CLASSES[model_type]
    known = {key: value for key, value in config.items() if key not in ("quantization_config", "model_type", "dtype")}
    model = model_class(config_class(**known)).eval()
    values = {}
    for name, slot in model.state_dict().items():
        stored = f"language_model.{name}" if model_type == "kimi_k25" else name
        if stored.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parent, _, leaf = stored.rpartition(".")
            leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
            of = [torch.cat([tiny.decoded[f"{parent}.{e}.{one}.weight"] for one in leaves]) for e in range(EXPERTS)]
            values[name] = torch.stack(of)
        else:
            values[name] = tiny.decoded[stored]
        assert values[name].shape == slot.shape
    model.load_state_dict(values)
    return model.to(dtype)
