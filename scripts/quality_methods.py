"""The methods that bench_quality.py compares: each makes a directory of INT4 out of an FP8 checkpoint.

A new method is a function of a ``Job`` and a line in ``METHODS``.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from scripts.fp8_blocks import read_dense

QUANTKIT = Path(sys.executable).with_name("quantkit")
# what is quantized, by model type and scope; the first pattern of each is what recipes quantize
EXPERTS = r"re:.*\.mlp\.experts\.\d+\.\w+_proj$"
TARGETS = {
    ("glm_moe_dsa", "experts"): (EXPERTS,),
    ("glm_moe_dsa", "linears"): (
        EXPERTS,
        r"re:.*\.mlp\.(?:shared_experts\.)?\w+_proj$",
        r"re:.*\.self_attn\.(?:q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj)$",
    ),
    ("llama", "linears"): (r"re:.*\.layers\.\d+\.\w+\.\w+_proj$",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """``dense`` holds the values of ``source`` in BF16. Statistics may be taken from its calibration text."""

    source: Path
    dense: Path
    output: Path
    group_size: int
    targets: tuple[str, ...]


def write_dense(source: Path, directory: Path) -> None:
    """The source as a plain BF16 checkpoint, for tools that read no FP8."""
    directory.mkdir()
    tensors = {
        name: tensor.to(torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16).contiguous()
        for name, tensor in read_dense(source).items()
    }
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))


def quantkit(*options: str) -> Callable[[Job], None]:
    """`quantkit convert` with some options."""

    def convert(job: Job) -> None:
        targets = [part for target in job.targets for part in ("--targets", target)]
        command: list[Any] = [QUANTKIT, "convert", job.source, "--to", "int4", "--output", job.output, *options]
        command += ["--group-size", job.group_size, *targets, "--allow-unservable", "--jobs", 1, "--quiet"]
        _run(command)

    return convert


def with_importance(*options: str) -> Callable[[Job], None]:
    """`quantkit calibrate`, then `convert` with what it found."""

    def convert(job: Job) -> None:
        statistics = job.output.with_suffix(".safetensors")
        tokens = job.source / "text" / "calibration.safetensors"
        _run([QUANTKIT, "calibrate", job.source, "--tokens", tokens, "--output", statistics, "--quiet"])
        quantkit("--importance", str(statistics), *options)(job)

    return convert


def streaming_gptq(*options: str) -> Callable[[Job], None]:
    """`quantkit convert --method gptq --streaming`."""

    def convert(job: Job) -> None:
        tokens = job.source / "text" / "calibration.safetensors"
        quantkit("--method", "gptq", "--streaming", "--tokens", str(tokens), *options)(job)

    return convert


def llmcompressor(method: str) -> Callable[[Job], None]:
    """GPTQ or an observer of llm-compressor."""
    script = Path(__file__).with_name("quality_llmcompressor.py")
    return lambda job: _run(
        [sys.executable, script, method, job.source, job.dense, job.output, job.group_size, *job.targets]
    )


def _run(command: list[Any]) -> None:
    """To the end; what it says is shown if it fails."""
    done = subprocess.run(
        list(map(str, command)), check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}")


METHODS: dict[str, Callable[[Job], None]] = {
    "absmax": quantkit("--scales", "absmax"),
    "llm-compressor minmax": llmcompressor("minmax"),
    "llm-compressor mse": llmcompressor("memoryless_mse"),
    "search": quantkit("--scales", "search"),
    "search, positive": quantkit("--scales", "search", "--positive-scales"),
    "search + importance": with_importance(),
    "importance, positive": with_importance("--positive-scales"),
    "llm-compressor GPTQ": llmcompressor("gptq"),
    "GPTQ": streaming_gptq(),
}
