"""A file of scales beside a checkpoint: tensors with the config section that belongs to them, or SGLang's JSON."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.disk import named_errors, put_in_place
from quantkit.checkpoint.writer import METADATA, ShardWriter, order_tensors
from quantkit.errors import UsageError
from quantkit.integrity.manifest import write_json
from quantkit.kv_scales.make import KvScaleReport, scales_document
from quantkit.kv_scales.spelling import config_section, scale_tensors, sglang_document
from quantkit.tensors import F32, TensorSpec

Tensors = Mapping[str, NDArray[np.float32]]
_MARK = "quantkit_kv_scales"
_SUFFIXES = {"sglang": ".json", "compressed-tensors": ".safetensors", "modelopt": ".safetensors"}


def sidecar_path(output: Path | None, name: str, report: KvScaleReport, checkpoint: Path) -> Path:
    """Where it goes. Raises UsageError for what is there already, in the checkpoint, or has another kind of name."""
    suffix = _SUFFIXES[report.kind.spelling]
    path = Path(f"{name}-kv-scales{suffix}") if output is None else output
    if path.suffix != suffix:
        raise UsageError(f"-o {path} is not the name of such a file", remedy=f"give a name that ends in {suffix}")
    if path.exists() or path.is_symlink():
        raise UsageError("exists already", file=path, remedy="choose another -o, or remove it")
    if path.resolve().is_relative_to(checkpoint.resolve()):
        raise UsageError("lies in the checkpoint", file=path, remedy="choose a -o apart from it")
    return path


def write_sidecar(path: Path, report: KvScaleReport, *, tp: int | None) -> None:
    """Whole or not at all. The same scales give the same bytes."""
    draft = path.with_name(f"{path.name}.draft")
    with named_errors(draft):
        draft.unlink(missing_ok=True)
    layers = [one.scales for one in report.layers]
    if report.kind.spelling == "sglang":
        assert tp is not None
        with named_errors(draft):
            write_json(draft, sglang_document(layers, report.kind, tp=tp))
    else:
        write_tensors(draft, scale_tensors(layers, report.kind), _about(report))
    with named_errors(path):
        put_in_place(draft, path)


def write_tensors(path: Path, tensors: Tensors, about: Mapping[str, str]) -> None:
    """A safetensors file, flushed to the disk."""
    specs = {name: TensorSpec(F32, array.shape) for name, array in tensors.items()}
    writer = ShardWriter(path, order_tensors(specs), {**METADATA, **about})
    try:
        for name in writer.specs:
            writer.write(name, tensors[name])
        writer.close()
    finally:
        writer.abort()


def _about(report: KvScaleReport) -> dict[str, str]:
    document: dict[str, Any] = {**scales_document(report), "quantization_config": config_section(report.kind)}
    return {_MARK: json.dumps(document, sort_keys=True, separators=(",", ":"))}
