"""All checks of an output directory, collected instead of stopping at the first fault."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.checkpoint.reader import hash_file
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import SourceError
from quantkit.families import FAMILIES
from quantkit.integrity.manifest import Manifest, read_manifest
from quantkit.integrity.weight_errors import class_errors
from quantkit.plan.make import make_plan
from quantkit.plan.plan import Plan
from quantkit.recipe import parse_recipe
from quantkit.threads import ReportProgress
from quantkit.verify.compare import compare_with_source
from quantkit.verify.report import Finding, VerifyReport, first_findings
from quantkit.verify.structure import check_contract, check_files, check_specs, open_output
from quantkit.verify.thresholds import check_errors

_CHECKS = ("files", "index and headers", "config and tensors")
_MAX_FINDINGS = 50  # of one check


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCheck:
    """How to compare values with the source; ``is_fast`` leaves out whatever needs dequantizing."""

    source: Checkpoint
    is_fast: bool = False
    num_jobs: int = 1
    report_progress: ReportProgress = lambda _, __: None


def verify_output(output: Path, values: ValueCheck | None = None) -> VerifyReport:
    """Manifest, files, index, headers, config; and with the source every value, unless something is wrong before.

    Raises VerificationError only where nothing can be checked (no manifest), SourceError for a bad source.
    """
    if not output.is_dir():
        raise SourceError("is not a directory", file=output, remedy="name the output of a conversion")
    manifest = read_manifest(output)
    findings = list(first_findings(check_files(output, manifest.output_files, with_hashes=True), _MAX_FINDINGS))
    checkpoint, more = open_output(output)
    findings += more
    report = VerifyReport(output=output, checks=_CHECKS, findings=tuple(findings), num_tensors=0)
    if checkpoint is None:
        return report
    contract = check_contract(
        checkpoint,
        family_name=str(manifest.document.get("family")),
        allow_incomplete=bool(manifest.document.get("is_incomplete")),
    )
    findings += first_findings(contract, _MAX_FINDINGS)
    report = replace(report, findings=tuple(findings), num_tensors=len(checkpoint.tensors))
    if values is None or not report.is_good:
        return report
    return _verify_values(report, manifest, checkpoint, values)


def planned_again(manifest: Manifest, source: Checkpoint) -> Plan:
    """The plan that made an output, from the recipe in its manifest."""
    recipe = parse_recipe(dict(manifest.recipe), where="conversion.json")
    family = FAMILIES[str(manifest.document["family"])]
    return make_plan(recipe, family, source, allow_unmatched=True, allow_incomplete=True)


def _verify_values(report: VerifyReport, manifest: Manifest, output: Checkpoint, values: ValueCheck) -> VerifyReport:
    checks = (*report.checks, "source")
    findings = list(report.findings)
    if not values.is_fast:
        findings += _check_source(manifest, values.source)
    plan = planned_again(manifest, values.source)
    findings += first_findings(check_specs(output, plan), _MAX_FINDINGS)
    if any(finding.is_error for finding in findings):
        return replace(report, checks=checks, findings=tuple(findings))
    comparison = compare_with_source(
        plan, output, is_fast=values.is_fast, num_jobs=values.num_jobs, report_progress=values.report_progress
    )
    classes = class_errors(comparison.errors)
    findings += comparison.findings[:_MAX_FINDINGS]
    thresholds = check_errors(comparison.errors, classes, group_size=plan.recipe.group_size)
    findings += first_findings(thresholds, _MAX_FINDINGS)
    return replace(
        report,
        checks=(*checks, "values against the source"),
        findings=tuple(findings),
        classes=classes,
        errors=tuple(comparison.errors),
    )


def _check_source(manifest: Manifest, source: Checkpoint) -> Iterator[Finding]:
    for shard in source.shards:
        record = manifest.source_shards.get(shard.name)
        if record is None or record.sha256 != hash_file(shard.path):
            yield Finding(
                check="source",
                message="is not the shard that the output was made from",
                file=shard.name,
                remedy="give the checkpoint that was converted",
            )
