"""Conversions in tests, and what compressed-tensors makes of the same weights."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file

from quantkit.convert.conversion import Conversion
from quantkit.convert.convert import ConvertReport, convert_checkpoint
from quantkit.convert.journal import read_journals
from quantkit.importance.open import open_importance
from quantkit.plan.importance import with_importance
from quantkit.plan.make import make_plan
from quantkit.recipe import override
from quantkit.sources import resolve_source
from quantkit.transcode import CPU

PROGRAM = "from quantkit.cli.app import main; main()"


def convert(
    source: Path,
    target: Path,
    *,
    num_jobs: int = 2,
    device: str = CPU,
    allow_unmatched: bool = False,
    importance: Path | None = None,
    **changes: Any,
) -> ConvertReport:
    """What `quantkit convert` does with a directory; ``changes`` override the recipe."""
    resolved = resolve_source(str(source))
    recipe = override(resolved.recipe, **changes)
    plan = make_plan(recipe, resolved.family, resolved.checkpoint, allow_unmatched=allow_unmatched)
    if importance is not None:
        plan = with_importance(plan, open_importance(importance))
    return convert_checkpoint(Conversion(plan=plan, target=target, num_jobs=num_jobs, device=device))


def start_command(endpoint: str, home: Path, token: str, *arguments: object) -> "subprocess.Popen[str]":
    """`quantkit convert` in a process of its own that asks a hub at ``endpoint``, with a cache of its own."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    command = [sys.executable, "-c", PROGRAM, "convert", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def load_output(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of an output, read by the safetensors library as its index says."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(set(index["weight_map"].values())):
        tensors |= load_file(directory / shard)
    assert set(tensors) == set(index["weight_map"])
    return tensors


def oracle_int4(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed words and scales that compressed-tensors makes of a weight rounded to BF16 (absmax)."""
    weight = weight.to(torch.bfloat16)
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group_size)
    groups = weight.reshape(*weight.shape[:-1], -1, group_size)
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    return pack_to_int32(quantize(weight, scale, zero_point, args, dtype=torch.int8), 4), scale


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Bit for bit, dtype and shape included."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return (
        first.contiguous().view(torch.uint8).equal(second.contiguous().view(torch.uint8))
        if first.ndim
        else first.equal(second)
    )


def leftovers(tmp_path: Path, siblings: set[str], target: str = "out") -> None:
    """Nothing is left of a conversion that failed but shards that it had finished, where it had finished any."""
    there = {path.name for path in tmp_path.iterdir()} - siblings
    if there:
        assert there == {f"{target}.partial"}
        partial = tmp_path / f"{target}.partial"
        finished = read_journals(partial / ".quantkit").outputs
        assert finished
        assert {path.name for path in partial.iterdir()} == {".quantkit", *finished}


def directory_bytes(directory: Path) -> dict[str, bytes]:
    """Every file of a directory, by relative name."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
