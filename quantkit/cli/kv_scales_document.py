"""The JSON document of `quantkit kv-scales`; its schema says the same and is tested."""

from typing import Any

from quantkit.cli.document import head
from quantkit.engines.parallel import ENGINE_VERSIONS
from quantkit.kv_scales.bound import LatentBound
from quantkit.kv_scales.make import LayerReport, PartReport
from quantkit.kv_scales.run import KvScaleResult
from quantkit.numerics.fp8 import E4M3_MAX
from quantkit.numerics.fp8_error import Fp8Error


def kv_scales_document(result: KvScaleResult) -> dict[str, Any]:
    """Bounds, scales and errors of every layer, verdicts, and what was written."""
    report = result.report
    kind = report.kind
    written = None
    if result.written is not None:
        written = {"path": str(result.written), "to": "checkpoint" if result.into_checkpoint else "sidecar"}
    return {
        **head("kv-scales"),
        "source": result.name,
        "family": kind.family,
        "attention": kind.attention.name.lower(),
        "num_layers": report.num_layers,
        "format": kind.spelling,
        "per": kind.scope,
        "method": report.method,
        "statistics": None if report.statistics is None else dict(report.statistics),
        "verdicts": [
            {
                "engine": row.engine,
                "engine_version": ENGINE_VERSIONS[row.engine],
                "backend": row.backend,
                "is_default": row.is_default,
                "verdict": row.use.value,
                "why": row.why,
            }
            for row in report.rows
        ],
        "is_useful": report.is_useful,
        "latent_bounds": [_bound(one) for one in report.bounds],
        "largest_fp8": E4M3_MAX,
        "layers": [_layer(one) for one in report.layers],
        "stored_scales": [{"tensor": one.name, "least": one.least, "largest": one.largest} for one in report.stored],
        "written": written,
        "why_not_written": result.why_not or None,
    }


def _bound(one: LatentBound) -> dict[str, Any]:
    return {
        "layer": one.layer,
        "tensor": one.tensor,
        "largest_gain": one.gain,
        "bound": one.bound,
        "unit_scale_is_safe": one.is_safe,
    }


def _layer(one: LayerReport) -> dict[str, Any]:
    return {
        "layer": one.scales.layer,
        "module": one.scales.module,
        "k_scale": one.scales.k.tolist(),
        "v_scale": one.scales.v.tolist(),
        "parts": [_part(part) for part in one.parts],
    }


def _part(part: PartReport) -> dict[str, Any]:
    return {
        "part": part.part,
        "largest": part.absmax,
        "num_values": part.at_unit.num_values,
        "at_unit_scale": _error(part.at_unit),
        "at_scale": _error(part.at_scale),
    }


def _error(error: Fp8Error) -> dict[str, float]:
    return {"clipped_fraction": error.clipped_fraction, "relative_error": error.relative}
