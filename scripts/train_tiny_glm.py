#!/usr/bin/env python
"""Train a small GLM-MoE-DSA model on the text of the Python install, a byte a token, and save it as FP8 blocks.

Trained weights have what random ones lack: outliers, inputs of unequal size, experts that differ. The directory holds
the checkpoint as GLM-5 is published, tokens of other files for statistics and for measuring
(``text/calibration.safetensors``, ``text/evaluation.safetensors``) and ``training.json``, which says how good it is.

    scripts/train_tiny_glm.py /tmp/glm-tiny                      # 18 minutes, two cores
    scripts/train_tiny_glm.py /tmp/glm-quick --steps 3 --batch 2 # to see that it works
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from quantkit.families import FAMILIES
from quantkit.module_names import expert_of, layer_of
from scripts.fp8_blocks import load_model, read_dense, write_fp8_checkpoint, write_tokens
from scripts.python_text import Part, byte_tokens, windows

LENGTH = 256
LEARNING_RATE = 3e-3
WARM_UP = 0.02
WEIGHT_DECAY = 0.1
BIAS_STEP = 1e-2
NUM_WINDOWS: dict[Part, int] = {"calibration": 128, "evaluation": 128}
REPORTS = 20


def tiny_config() -> GlmMoeDsaConfig:
    """Four layers, three of them with 16 experts; the indexer admits every token of a window."""
    return GlmMoeDsaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=16,
        num_experts_per_tok=2,
        n_shared_experts=1,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=64,
        index_n_heads=4,
        index_head_dim=64,
        index_topk=1024,
        first_k_dense_replace=1,
        max_position_embeddings=1024,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=None,
    )


def new_model() -> Any:
    """With what of transformers is fastest on a CPU, by a tenth."""
    make: Any = GlmMoeDsaForCausalLM._from_config
    return make(tiny_config(), attn_implementation="sdpa", experts_implementation="grouped_mm")


@dataclass(kw_only=True)
class Training:
    """How far a training is; its schedule follows the steps where they are given, else the time."""

    minutes: float
    steps: int | None
    started: float = field(default_factory=time.monotonic)
    step: int = 0

    @property
    def progress(self) -> float:
        if self.steps is not None:
            return self.step / self.steps
        return (time.monotonic() - self.started) / (60 * self.minutes)

    def learning_rate(self) -> float:
        warm = min(1.0, (self.progress + 1e-3) / WARM_UP)
        return LEARNING_RATE * warm * (0.02 + 0.98 * (1 + math.cos(math.pi * self.progress)) / 2)


class Balance:
    """The bias of each router goes up where an expert had too few tokens and down where too many (DeepSeek-V3)."""

    def __init__(self, model: Any) -> None:
        self._gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        self._counts = [torch.zeros(gate.num_experts) for gate in self._gates]
        for gate, count in zip(self._gates, self._counts, strict=True):
            gate.register_forward_hook(lambda _gate, _inputs, output, count=count: self._add(count, output[2]))

    @staticmethod
    def _add(count: Tensor, chosen: Tensor) -> None:
        count += torch.bincount(chosen.reshape(-1), minlength=len(count))

    def update(self, rate: float) -> None:
        for gate, count in zip(self._gates, self._counts, strict=True):
            gate.e_score_correction_bias += rate * torch.sign(count.mean() - count)
            count.zero_()

    def loads(self) -> list[float]:
        """Per layer, the tokens of the least used expert over the mean."""
        found = [round(float(count.min() / count.mean()), 3) for count in self._counts]
        for count in self._counts:
            count.zero_()
        return found


def batches(seed: int, batch: int) -> Iterator[Tensor]:
    tokens = torch.from_numpy(byte_tokens("training"))
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - LENGTH, (batch, 1), generator=generator)
        yield tokens[starts + torch.arange(LENGTH)]


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


@torch.no_grad()
def bits_per_byte(model: Any, tokens: Tensor) -> float:
    losses = [loss_of(model, part).item() for part in torch.split(tokens, 16)]
    return float(np.mean(losses)) / math.log(2)


def optimizer_of(model: Any) -> torch.optim.AdamW:
    trained = {name: one for name, one in model.named_parameters() if ".indexer." not in name}
    groups = [
        {"params": [one for one in trained.values() if one.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [one for one in trained.values() if one.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def admit_everything(hidden: Tensor, *_arguments: Any, **_options: Any) -> Tensor:
    """In place of an indexer: it has no gradient, and with so short windows it admits every token anyway."""
    count, length = hidden.shape[:2]
    return torch.arange(length, dtype=torch.int32).expand(count, length, length)


def train(model: Any, training: Training, seed: int, batch: int, held_out: Tensor) -> list[dict[str, float]]:
    """The history: steps, minutes, bits a byte on held-out text."""
    for layer in model.model.layers:
        layer.self_attn.indexer.forward = admit_everything
    optimizer, balance = optimizer_of(model), Balance(model)
    history: list[dict[str, float]] = []
    for tokens in batches(seed, batch):
        if training.progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate()
        loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        balance.update(BIAS_STEP * max(0.05, 1 - training.progress))
        training.step += 1
        if training.progress >= (len(history) + 1) / REPORTS:
            bits = bits_per_byte(model, held_out[:16])
            minutes = round((time.monotonic() - training.started) / 60, 2)
            history.append({"step": training.step, "minutes": minutes, "bits_per_byte": round(bits, 4)})
            print(history[-1] | {"least_load": balance.loads()}, flush=True)
    for layer in model.model.layers:
        del layer.self_attn.indexer.forward
    return history


def checkpoint_tensors(model: Any) -> dict[str, Tensor]:
    """With the names of published checkpoints, which transformers gives when it saves."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return load_file(Path(directory) / "model.safetensors")


def kurtosis(tensors: dict[str, Tensor]) -> dict[str, float]:
    """Mean over the weights of a kind; 3 is Gaussian."""
    kinds: dict[str, list[float]] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            standard = (tensor - tensor.mean()) / tensor.std()
            layer = layer_of(name)
            kind = (name.partition(".")[2] if layer is None else layer.rest).removesuffix(".weight")
            expert = expert_of(kind)
            kind = kind if expert is None else f"experts.{expert.rest}"
            kinds.setdefault(kind, []).append(float((standard**4).mean()))
    return {kind: round(float(np.mean(found)), 2) for kind, found in sorted(kinds.items())}


def save(model: Any, directory: Path) -> None:
    tensors = checkpoint_tensors(model)
    config = model.config.to_dict()
    config["architectures"] = ["GlmMoeDsaForCausalLM"]
    expected = FAMILIES["glm_moe_dsa"].expected_tensors(config)
    write_fp8_checkpoint(directory, tensors, {one.name for one in expected if one.is_fp8}, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="to create")
    parser.add_argument("--minutes", type=float, default=18, help="of training [18]")
    parser.add_argument("--steps", type=int, help="instead of minutes: the same steps on every machine")
    parser.add_argument("--batch", type=int, default=4, help=f"windows of {LENGTH} bytes in a step [4]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.directory.exists():
        parser.error(f"{arguments.directory} exists already")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    texts = {}
    for part, count in NUM_WINDOWS.items():
        texts[part] = torch.from_numpy(windows(byte_tokens(part), count, LENGTH))
    model = new_model()
    training = Training(minutes=arguments.minutes, steps=arguments.steps)
    history = train(model, training, arguments.seed, arguments.batch, texts["evaluation"])
    model.eval()
    save(model, arguments.directory)
    for part, tokens in texts.items():
        write_tokens(arguments.directory, part, tokens)
    document = {
        "seed": arguments.seed,
        "steps": training.step,
        "bytes": training.step * arguments.batch * LENGTH,
        "minutes": round((time.monotonic() - training.started) / 60, 2),
        "cpu_minutes": round(time.process_time() / 60, 2),
        "bits_per_byte": round(bits_per_byte(model, texts["evaluation"]), 4),
        "bits_per_byte_fp8": round(bits_per_byte(load_model(arguments.directory), texts["evaluation"]), 4),
        "kurtosis": kurtosis(read_dense(arguments.directory)),
        "history": history,
    }
    (arguments.directory / "training.json").write_text(json.dumps(document, indent=2))
    print(json.dumps({key: value for key, value in document.items() if key != "history"}, indent=2))


if __name__ == "__main__":
    main()
