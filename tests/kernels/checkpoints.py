"""Models of transformers for converted checkpoints, and checkpoints that are damaged."""

import json

import torch
from safetensors.torch import load_file, save_file


def build(directory, dtype=torch.bfloat16):
    """The model of a checkpoint, without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype)


def damaged(converted, directory, change):
    """A copy of the checkpoint in one file, changed."""
    tensors = {}
    for shard in converted.glob("*.safetensors"):
        tensors |= load_file(shard)
    config = json.loads((converted / "config.json").read_text())
    change(tensors, config)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config))
    return directory
