"""JSON documents of the results, one function each; the schemas beside them say the same and are tested."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantkit.calibrated.needs import CalibrationNeeds
from quantkit.cli.document import class_document, head
from quantkit.cli.planning import PlanDescription
from quantkit.convert.convert import ConvertReport
from quantkit.convert.manifest import importance_document
from quantkit.convert.publish import PublishReport
from quantkit.convert.ranks import RankReport
from quantkit.engines.verdicts import EngineReport
from quantkit.plan.plan import Plan
from quantkit.plan.resources import disk_bytes
from quantkit.recipe import recipe_document
from quantkit.verify.report import Finding, VerifyReport
from quantkit.weights.inspection import InspectReport


def plan_document(described: PlanDescription) -> dict[str, Any]:
    """Decisions, exact bytes, needs, legal tensor-parallel sizes, what engines make of it, and warnings."""
    plan, calibration = described.plan, described.calibration
    largest = max(plan.shards, key=lambda shard: shard.file_bytes)
    return {
        **head("plan"),
        "recipe": recipe_document(plan.recipe),
        "family": plan.family,
        "source": {
            "num_tensors": len(plan.checkpoint.tensors),
            "tensor_bytes": plan.checkpoint.num_bytes,
            "num_shards": len(plan.checkpoint.shards),
        },
        "output": {
            "num_tensors": plan.num_tensors,
            "tensor_bytes": plan.tensor_bytes,
            "shard_bytes": sum(shard.file_bytes for shard in plan.shards),
            "num_shards": len(plan.shards),
            "largest_shard": {"name": largest.name, "bytes": largest.file_bytes},
        },
        "needs": {
            "disk_bytes": disk_bytes(plan),
            "memory_bytes": described.workers.memory_bytes(plan),
            "calibration": _calibration_needs_document(plan, calibration) if calibration else None,
        },
        "parts": [
            {
                "role": part.role.value,
                "source": part.codec,
                "action": part.action.value,
                "num_weights": part.num_weights,
                "num_elements": part.num_elements,
                "source_bytes": part.source_bytes,
                "output_bytes": part.output_bytes,
            }
            for part in plan.parts
        ],
        "quantized_share": plan.int4_share,
        "rules": [{"rule": rule.rule, "action": rule.action, "num_weights": rule.num_weights} for rule in plan.rules],
        "tensor_parallel": [
            {
                "tp": verdict.tp,
                "engine": verdict.engine,
                "status": verdict.status,
                "kernels": list(verdict.kernels),
                "reason": verdict.reason,
            }
            for verdict in described.tp
        ],
        "engines": [engine_document(report) for report in described.loading],
        "importance": None if plan.importance is None else plan.importance.document(),
        "dropped_tensors": dict(plan.dropped),
        "skipped_files": dict(plan.checkpoint.sidecars.skipped),
        "limits": None if plan.partial is None else plan.partial.document(),
        "warnings": list(plan.warnings),
    }


def _calibration_needs_document(plan: Plan, needs: Sequence[CalibrationNeeds]) -> dict[str, Any]:
    return {
        "method": plan.recipe.method,
        "ways": [
            {
                "streaming": way.streaming,
                "wanted_tokens": way.wanted_tokens,
                "words_bytes": way.words_bytes,
                "token_bytes": way.token_bytes,
                "decoded_bytes": way.decoded_bytes,
                "disk_bytes": way.disk_bytes(way.wanted_tokens or 0),
                "memory_bytes": way.memory_bytes,
            }
            for way in needs
        ],
    }


def rank_document(report: RankReport) -> dict[str, Any]:
    """What one rank of several has made."""
    return {
        **head("convert"),
        "rank": report.rank,
        "world_size": report.world_size,
        "partial": str(report.partial),
        "num_shards": report.num_shards,
        "num_tensors": report.num_tensors,
    }


def convert_document(
    report: ConvertReport, published: PublishReport | None, command: str = "convert"
) -> dict[str, Any]:
    """What was written, its errors, how fast, and where it was published."""
    importance = report.plan.importance
    return {
        **head(command),
        "output": str(report.output),
        "num_tensors": report.plan.num_tensors,
        "tensor_bytes": report.plan.tensor_bytes,
        "source_bytes": report.plan.checkpoint.num_bytes,
        "errors": [class_document(one) for one in report.classes],
        "importance": None if importance is None else importance_document(importance, report.gains),
        "calibration": None if report.calibration is None else _calibration_document(report),
        "findings": [_finding_document(finding) for finding in report.findings],
        "limits": None if report.plan.partial is None else report.plan.partial.document(),
        "warnings": list(report.plan.warnings),
        "seconds": report.seconds,
        "earlier_bytes": report.earlier_bytes,
        "encoded_bytes": report.encoded_bytes,
        "encode_cpu_seconds": report.encode_seconds,
        "published": None if published is None else asdict(published),
    }


def _calibration_document(report: ConvertReport) -> dict[str, Any]:
    """By which method over how many tokens, and how many weights it chose."""
    assert report.calibration is not None
    seen = report.plan.recipe.calibration
    assert seen is not None
    return {
        "method": report.plan.recipe.method,
        "by": report.calibration["by"],
        "tokens": {"sha256": seen.tokens, "num_sequences": seen.sequences, "length": seen.length},
        "num_calibrated": report.calibration["num_calibrated"],
        "num_searched": report.calibration["num_searched"],
    }


def card_document(output: Path, card: str) -> dict[str, Any]:
    """A model card, whole."""
    return {**head("card"), "output": str(output), "card": card}


def verify_document(report: VerifyReport) -> dict[str, Any]:
    """Checks, findings and errors by class."""
    return {
        **head("verify", "ok" if report.is_good else "failed"),
        "output": str(report.output),
        "checks": list(report.checks),
        "num_tensors": report.num_tensors,
        "errors": [class_document(one) for one in report.classes],
        "weights": [{"name": one.name, "role": one.role, "relative_error": one.relative} for one in report.errors],
        "findings": [_finding_document(finding) for finding in report.findings],
        "engine": None if report.engine is None else engine_document(report.engine),
    }


def engine_document(report: EngineReport) -> dict[str, Any]:
    """Modules that are alike are one entry; what loads silently wrong comes first."""
    return {
        "engine": report.engine,
        "version": report.version,
        "worst": report.worst.value,
        "modules": [
            {
                "modules": row.name,
                "num_modules": row.num_modules,
                "scheme": row.example.scheme,
                "outcome": row.example.outcome.value,
                "message": row.example.message,
                "tensor": row.example.tensor,
                "remedy": row.example.remedy,
            }
            for row in report.rows
        ],
    }


def _finding_document(finding: Finding) -> dict[str, Any]:
    return {
        "check": finding.check,
        "level": "error" if finding.is_error else "warning",
        "message": finding.message,
        "tensor": finding.tensor,
        "file": finding.file,
        "remedy": finding.remedy,
    }


def inspect_document(report: InspectReport) -> dict[str, Any]:
    """Totals, and parts by role and dtype."""
    return {
        **head("inspect"),
        "family": report.family,
        "model_type": report.model_type,
        "scheme": report.scheme,
        "num_shards": report.num_shards,
        "num_tensors": report.num_tensors,
        "num_bytes": report.num_bytes,
        "num_parameters": report.num_parameters,
        "parts": [
            {
                "role": part.role.value,
                "dtype": part.dtype,
                "num_tensors": part.num_tensors,
                "num_elements": part.num_elements,
                "num_bytes": part.num_bytes,
            }
            for part in report.parts
        ],
    }
