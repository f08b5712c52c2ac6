"""From a source, and statistics where there are any: the proof, the scales, their errors, and who would use them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.source import Checkpoint
from quantkit.engines.kv_use import Attention, KvScales, KvScope, KvSpelling, KvUse, KvUseRow, is_useful, kv_use
from quantkit.errors import SourceError, UsageError
from quantkit.families.family import Family
from quantkit.families.kv_shape import HeadKv, KvShape, LatentKv
from quantkit.kv_scales.bound import LatentBound, latent_bounds
from quantkit.kv_scales.choose import (
    DEFAULT_METHOD,
    DEFAULT_PERCENTILE,
    Method,
    choose_scale,
    error_of,
    scales_of_heads,
)
from quantkit.kv_scales.observed import Observed, observed
from quantkit.kv_scales.spelling import LayerScales
from quantkit.module_names import layer_name
from quantkit.numerics.fp8_error import Fp8Error
from quantkit.statistics.file import Statistics, open_statistics
from quantkit.statistics.names import KvPart
from quantkit.weights.binding import Binding, bind_checkpoint
from quantkit.weights.completeness import text_root
from quantkit.weights.identity import model_fingerprint
from quantkit.weights.stored_kv_scales import StoredKvScale, stored_kv_scales

_UNIT = np.ones(1, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvScaleRequest:
    """``spelling`` and ``method`` are None where they are left to the source and to what is at hand."""

    statistics: Path | None = None
    method: Method | None = None
    percentile: float = DEFAULT_PERCENTILE
    scope: KvScope = "tensor"
    spelling: KvSpelling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """Keys, values, latent or rope part of a layer: largest magnitude, its scales, errors at 1.0 and at the scales."""

    part: KvPart
    absmax: float
    scales: NDArray[np.float32]
    at_unit: Fp8Error
    at_scale: Fp8Error


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """``parts`` is empty without statistics."""

    scales: LayerScales
    parts: tuple[PartReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvScaleReport:
    """``method`` is None where there are no scales. ``bounds``: of latent attention. ``rows``: who would use them."""

    kind: KvScales
    num_layers: int
    method: Method | None
    layers: tuple[LayerReport, ...]
    bounds: tuple[LatentBound, ...]
    stored: tuple[StoredKvScale, ...]
    rows: tuple[KvUseRow, ...]
    statistics: Mapping[str, str] | None

    @property
    def is_unit(self) -> bool:
        """Whether every scale is 1."""
        return all((one.scales.k == 1).all() and (one.scales.v == 1).all() for one in self.layers)

    @property
    def is_useful(self) -> bool:
        return is_useful(self.rows)

    @property
    def why_not_written(self) -> str:
        """Why scales stay unwritten without ``--force``; empty where they do not."""
        if not self.is_useful:
            return "KV scales do nothing here, as no backend that an engine takes by itself uses them"
        if self.method is None:
            return "there are no scales: give --stats FILE, or --method unit for 1.0"
        harmful = [f"{row.engine} {row.backend}" for row in self.rows if row.use is KvUse.HARMFUL]
        return f"they make attention wrong in {', '.join(harmful)}" if harmful and not self.is_unit else ""


def make_kv_scales(checkpoint: Checkpoint, family: Family, request: KvScaleRequest) -> KvScaleReport:
    """Tensors of a few kilobytes a layer are read, none of a matrix.

    Raises UsageError for options that do not go together, SourceError for statistics of another model, layers that were
    not visited, and stored scales that cannot be meant.
    """
    method = _method(request)
    shape = _shape(checkpoint, family)
    kind = _kind(checkpoint, family, shape, request)
    binding = bind_checkpoint(checkpoint, family)
    statistics = None if request.statistics is None else open_statistics(request.statistics)
    if statistics is not None:
        statistics.check_model(model_fingerprint(binding, family, checkpoint.config))
    bounds = latent_bounds(binding, family, checkpoint.config, shape) if isinstance(shape, LatentKv) else ()
    num_layers = family.num_layers(checkpoint.config)
    layers = () if method is None else _layers(binding, shape, statistics, request, method, num_layers)
    return KvScaleReport(
        kind=kind,
        num_layers=num_layers,
        method=method,
        layers=layers,
        bounds=tuple(bounds),
        stored=tuple(stored_kv_scales(checkpoint.tensors)),
        rows=kv_use(kind),
        statistics=None if statistics is None else statistics.metadata,
    )


def _method(request: KvScaleRequest) -> Method | None:
    if request.statistics is None:
        if request.method not in (None, "unit"):
            raise UsageError(
                f"--method {request.method} needs statistics", remedy="give --stats FILE, or --method unit"
            )
        return request.method
    return request.method or DEFAULT_METHOD


def _shape(checkpoint: Checkpoint, family: Family) -> KvShape:
    if family.kv_shape is None:
        raise SourceError(f"what a {family.name} model keeps of a token is not known", remedy="add it to the family")
    return family.kv_shape(family.text_config(checkpoint.config))


def _kind(checkpoint: Checkpoint, family: Family, shape: KvShape, request: KvScaleRequest) -> KvScales:
    attention = Attention.of(shape)
    method = str(checkpoint.quantization.get("quant_method", ""))
    own: KvSpelling = "modelopt" if method.startswith("modelopt") else "compressed-tensors"
    spelling = request.spelling or own
    if request.scope == "head" and attention is not Attention.GROUPED:
        raise UsageError("--per head: latent attention keeps one row for all heads", remedy="leave --per out")
    if request.scope == "head" and spelling != "compressed-tensors":
        raise UsageError(f"--per head: {spelling} has one number", remedy="give --format compressed-tensors")
    model_type = family.text_config(checkpoint.config).get("model_type") or checkpoint.config.get("model_type")
    return KvScales(
        family=family.name,
        model_type=str(model_type),
        attention=attention,
        spelling=spelling,
        scope=request.scope,
        method=method,
    )


def _layers(
    binding: Binding,
    shape: KvShape,
    statistics: Statistics | None,
    request: KvScaleRequest,
    method: Method,
    num_layers: int,
) -> tuple[LayerReport, ...]:
    root = text_root(binding)
    found = []
    for layer in range(num_layers):
        parts = () if statistics is None else observed(statistics, shape, root, layer)
        k, v = _scales(parts, shape, request, method)
        scales = LayerScales(layer=layer, module=f"{layer_name(root, layer)}.self_attn", k=k, v=v)
        reports = tuple(_part_report(part, v if part.part is KvPart.VALUE else k) for part in parts)
        found.append(LayerReport(scales=scales, parts=reports))
    return tuple(found)


def _scales(
    parts: tuple[Observed, ...], shape: KvShape, request: KvScaleRequest, method: Method
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Of k and v. A latent row has one for all of it, its rope part too, and it is read again as v."""
    if not parts:
        unit = np.repeat(_UNIT, shape.num_kv_heads) if isinstance(shape, HeadKv) and request.scope == "head" else _UNIT
        return unit, unit
    if isinstance(shape, LatentKv):
        both = np.array([choose_scale(parts, method, request.percentile)], np.float32)
        return both, both
    k, v = parts
    if request.scope == "head":
        return scales_of_heads(k, method, request.percentile), scales_of_heads(v, method, request.percentile)
    return (
        np.array([choose_scale([k], method, request.percentile)], np.float32),
        np.array([choose_scale([v], method, request.percentile)], np.float32),
    )


def _part_report(part: Observed, scales: NDArray[np.float32]) -> PartReport:
    return PartReport(
        part=part.part,
        absmax=part.absmax,
        scales=scales,
        at_unit=error_of(part, _UNIT),
        at_scale=error_of(part, scales),
    )


def scales_document(report: KvScaleReport) -> dict[str, Any]:
    """What a file of scales says of itself."""
    made: dict[str, Any] = {"method": report.method, "per": report.kind.scope, "format": report.kind.spelling}
    return made | ({} if report.statistics is None else {"model": report.statistics.get("model", "")})
