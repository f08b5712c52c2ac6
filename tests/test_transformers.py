"""A model that transformers saved, FP8-quantized and converted, loads in transformers and says nearly the same.

The source is decoded by torch here, the output by compressed-tensors inside transformers: none of our decoders.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.convert.helpers import convert
from tests.tiny import expand, quantize_fp8_blocks

NUM_SEEDS = 8
FP8_LEAVES = ("_proj.weight", "kv_a_proj_with_mqa.weight", "wq_b.weight", "wk.weight")


def save_model(directory: Path, seed: int):
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    torch.manual_seed(seed)
    config = GlmMoeDsaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=64,
        index_n_heads=4,
        index_head_dim=64,
        index_topk=16,
        first_k_dense_replace=1,
        max_position_embeddings=512,
    )
    GlmMoeDsaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def quantize_source(saved: Path, source: Path, decoded: Path) -> None:
    """The saved model as an FP8 block checkpoint, and the same values in FP32."""
    stored, values = {}, {}
    for name, tensor in load_file(saved / "model.safetensors").items():
        if name.endswith(FP8_LEAVES) and "weights_proj" not in name:
            codes, scale = quantize_fp8_blocks(tensor.float())
            stored[name], stored[name + "_scale_inv"] = codes, scale
            values[name] = codes.float() * expand(scale, *codes.shape)
        else:
            stored[name], values[name] = tensor, tensor.float()
    config = json.loads((saved / "config.json").read_text())
    for directory, tensors in ((source, stored), (decoded, values)):
        directory.mkdir()
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            directory / "model.safetensors",
            {"format": "pt"},
        )
    (decoded / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    section = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": section}))


@torch.no_grad()
def log_probabilities(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    torch.nn.Module.float(model)  # what was decompressed too
    return model(tokens).logits.log_softmax(-1)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_output_loads_in_transformers_and_search_beats_absmax(tmp_path):
    divergence = {"search": [], "absmax": []}
    for seed in range(NUM_SEEDS):
        here = tmp_path / str(seed)
        save_model(here / "saved", seed)
        quantize_source(here / "saved", here / "source", here / "decoded")
        tokens = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(seed))
        reference = log_probabilities(here / "decoded", tokens)
        for scales, found in divergence.items():
            convert(here / "source", here / scales, scales=scales)
            got = log_probabilities(here / scales, tokens)
            found.append((reference.exp() * (reference - got)).sum(-1).mean().item())
    assert max(divergence["search"]) < 0.01
    assert sum(divergence["search"]) <= 0.9 * sum(divergence["absmax"])
    assert min(divergence["search"]) > 1e-6  # something was quantized
