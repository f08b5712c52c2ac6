"""A file of scales beside a checkpoint: tensors with the config section that belongs to them, or SGLang's JSON."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.disk import named_errors, write_whole
from quantkit.checkpoint.whole_file import check_new_file, whole_shard
from quantkit.checkpoint.writer import METADATA
from quantkit.errors import UsageError
from quantkit.integrity.manifest import json_bytes
from quantkit.kv_scales.make import KvScaleReport, scales_document
from quantkit.kv_scales.spelling import config_section, scale_tensors, sglang_document
from quantkit.tensors import F32, TensorSpec

Tensors = Mapping[str, NDArray[np.float32]]
MARK = "quantkit_kv_scales"
_SUFFIXES = {"sglang": ".json", "compressed-tensors": ".safetensors", "modelopt": ".safetensors"}


def sidecar_path(output: Path | None, name: str, report: KvScaleReport, checkpoint: Path) -> Path:
    """Where it goes. Raises UsageError for what is there already, in the checkpoint, or has another kind of name."""
    suffix = _SUFFIXES[report.kind.spelling]
    path = Path(f"{name}-kv-scales{suffix}") if output is None else output
    if path.suffix != suffix:
        raise UsageError(f"-o {path} is not the name of such a file", remedy=f"give a name that ends in {suffix}")
    check_new_file(path, outside=checkpoint)
    return path


def write_sidecar(path: Path, report: KvScaleReport, *, tp: int | None) -> None:
    """Whole or not at all. The same scales give the same bytes."""
    layers = [one.scales for one in report.layers]
    if report.kind.spelling == "sglang":
        assert tp is not None
        with named_errors(path):
            write_whole(path, json_bytes(sglang_document(layers, report.kind, tp=tp)))
    else:
        write_tensors(path, scale_tensors(layers, report.kind), _about(report))


def write_tensors(path: Path, tensors: Tensors, about: Mapping[str, str]) -> None:
    """A safetensors file, whole or not at all."""
    specs = {name: TensorSpec(F32, array.shape) for name, array in tensors.items()}
    with whole_shard(path, specs, {**METADATA, **about}) as writer:
        for name in writer.specs:
            writer.write(name, tensors[name])


def _about(report: KvScaleReport) -> dict[str, str]:
    document: dict[str, Any] = {**scales_document(report), "quantization_config": config_section(report.kind)}
    return {MARK: json.dumps(document, sort_keys=True, separators=(",", ":"))}
