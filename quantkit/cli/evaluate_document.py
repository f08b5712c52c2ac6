"""The JSON document of `quantkit evaluate`; its schema says the same and is tested."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quantkit.cli.document import class_document, head
from quantkit.evaluate.criteria import Criteria
from quantkit.evaluate.report import EvaluateReport
from quantkit.evaluate.summary import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """As they were given. ``file``: with the text or the tokens."""

    source: str
    output: str
    file: str
    dtype: str
    device: str


def evaluate_document(report: EvaluateReport, settings: Settings, criteria: Criteria) -> dict[str, Any]:
    """All figures, unrounded."""
    summary = report.summary
    failures = list(criteria.failures(summary))
    num_sequences, length = report.tokens.ids_NS.shape
    return {
        **head("evaluate", "failed" if failures else "ok"),
        "source": settings.source,
        "output": settings.output,
        "model": {
            "family": report.family.name,
            "model_type": report.model_type,
            "num_layers": len(report.layers),
        },
        "run": {"dtype": settings.dtype, "device": settings.device},
        "tokens": {
            "file": settings.file,
            "num_sequences": num_sequences,
            "length": length,
            "num_predictions": summary.num_predictions,
            "sha256": report.tokens.sha256,
        },
        "perplexity": {
            "source": summary.source_perplexity,
            "output": summary.output_perplexity,
            "ratio": summary.ratio.value,
            "ratio_standard_error": summary.ratio.standard_error,
        },
        "kl_divergence": {
            **_estimate("mean", summary.kl.mean),
            "median": summary.kl.median,
            "p90": summary.kl.p90,
            "p99": summary.kl.p99,
            "p99_9": summary.kl.p99_9,
            "max": summary.kl.maximum,
        },
        **_estimate("top1_agreement", summary.same_top),
        "top_probability_shift": {"rms": summary.top_shift_rms, "mean": summary.top_shift_mean},
        "kl_histogram": {
            "below": summary.histogram.below,
            "edges": list(summary.histogram.edges),
            "counts": list(summary.histogram.counts),
        },
        "layers": _layers(report),
        "errors": [class_document(one) for one in report.classes],
        "sizes": [
            {"role": one.role, "source_bytes": one.source_bytes, "output_bytes": one.output_bytes}
            for one in report.sizes
        ],
        "criteria": {"max_kl": criteria.max_kl, "min_top1": criteria.min_top1},
        "failures": failures,
        "warnings": list(_warnings(report)),
    }


def _estimate(name: str, one: Estimate) -> dict[str, float | None]:
    error_name = "standard_error" if name == "mean" else f"{name}_standard_error"
    return {name: one.value, error_name: one.standard_error}


def _layers(report: EvaluateReport) -> list[dict[str, Any]]:
    return [
        {
            "layer": one.layer,
            "hidden_error": one.hidden,
            "expert_error": one.experts,
            "weight_errors": {str(part.role): part.relative for part in report.layer_classes.get(one.layer, ())},
        }
        for one in report.layers
    ]


def _warnings(report: EvaluateReport) -> Iterator[str]:
    if report.missing:
        yield (
            f"{len(report.missing):,} weights of the source are not in the output, or in no form that can be compared "
            f"({report.missing[0]} first)"
        )
    if len(report.tokens.ids_NS) < 2:
        yield "one sequence: nothing is known of how much another would differ (no standard errors)"
