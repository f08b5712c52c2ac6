#!/usr/bin/env python
"""The steps of benchmark_convert.py that are not quantkit's own, each a process of its own.

scripts/benchmark_tasks.py copy|llmcompressor|error ARGUMENT SOURCE OUTPUT
"""

import argparse
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

GROUP_SIZE = 32
BLOCK = 128
NUM_ERROR_WEIGHTS = 6
CHUNK_BYTES = 8 << 20
NUM_JOBS = len(os.sched_getaffinity(0))
# llm-compressor dequantizes what it is told to by name
FP8_MODULES = (r"re:.*\.mlp\..*_proj$", r"re:.*\.self_attn\.\w+_(proj|mqa|b)$", r"re:.*\.indexer\.w(k|q_b)$")
EXPERT_MODULES = r"re:.*\.mlp\.experts\.\d+\.\w+_proj$"


def run_copy(output_bytes: str, source: Path, output: Path) -> None:
    """Read every shard, write ``output_bytes`` at the same pace, fsync."""
    share = int(output_bytes) / sum(path.stat().st_size for path in source.glob("*.safetensors"))
    chunk = memoryview(bytearray(CHUNK_BYTES))
    num_read = num_written = 0
    output.mkdir()
    with (output / "copy.safetensors").open("wb", buffering=0) as target:
        for path in sorted(source.glob("*.safetensors")):
            with path.open("rb", buffering=0) as shard:
                while count := shard.readinto(chunk):
                    num_read += count
                    while num_written < int(num_read * share):
                        num_written += target.write(chunk[: int(num_read * share) - num_written])
        os.fsync(target.fileno())


def run_llmcompressor(observer: str, source: Path, output: Path) -> None:
    """Experts to symmetric INT4, the rest dequantized to BF16: what quantkit's default does."""
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.entrypoints.model_free import model_free_ptq

    weights = QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP_SIZE, observer=observer
    )
    model_free_ptq(
        source,
        output,
        scheme=QuantizationScheme(targets=[EXPERT_MODULES], weights=weights),
        max_workers=NUM_JOBS,
        device="cpu",
        converter=FP8BlockDequantizer(targets=FP8_MODULES),
    )


def run_error(group_size: str, source: Path, output: Path) -> None:
    """Print the relative error over a few expert weights."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    of_source, of_output = tensor_loader(source), tensor_loader(output)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    names = sorted(name for name in index["weight_map"] if ".mlp.experts." in name and name.endswith(".weight"))
    error2 = weight2 = 0.0
    for name in names[:: -(-len(names) // NUM_ERROR_WEIGHTS)]:
        unit = of_source(f"{name}_scale_inv").repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        values = of_source(name).float() * unit
        codes = unpack_from_int32(of_output(f"{name}_packed"), 4, values.shape)
        decoded = codes.float() * of_output(f"{name}_scale").float().repeat_interleave(int(group_size), 1)
        error2 += (decoded - values).double().square().sum().item()
        weight2 += values.double().square().sum().item()
    print(math.sqrt(error2 / weight2))


def tensor_loader(directory: Path) -> Callable[[str], Any]:
    """Loads a checkpoint's tensors by name, as torch sees them."""
    from safetensors import safe_open

    index = json.loads((directory / "model.safetensors.index.json").read_text())

    def load(name: str) -> Any:
        with safe_open(directory / index["weight_map"][name], framework="pt") as shard:
            return shard.get_tensor(name)

    return load


TASKS: dict[str, Callable[[str, Path, Path], None]] = {
    "copy": run_copy,
    "llmcompressor": run_llmcompressor,
    "error": run_error,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=sorted(TASKS))
    for name in ("argument", "source", "output"):
        parser.add_argument(name)
    asked = parser.parse_args()
    TASKS[asked.task](asked.argument, Path(asked.source), Path(asked.output))
