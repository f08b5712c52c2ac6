"""All checks of an output directory, collected instead of stopping at the first fault."""

from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.checkpoint.file_names import MANIFEST_NAME
from quantkit.checkpoint.source import Checkpoint, open_checkpoint
from quantkit.engines.launch import Launch
from quantkit.engines.verdicts import EngineReport
from quantkit.errors import RecipeError, UsageError, VerificationError
from quantkit.families import FAMILIES, Family, family_of
from quantkit.integrity.manifest import FileRecord, Manifest, read_manifest
from quantkit.integrity.weight_errors import class_errors
from quantkit.plan.limits import Limits
from quantkit.plan.make import make_plan
from quantkit.plan.part import limited
from quantkit.plan.plan import Plan
from quantkit.recipe import Recipe, parse_recipe
from quantkit.threads import ReportProgress
from quantkit.verify.compare import Comparison, compare_with_source
from quantkit.verify.hashes import check_hashes
from quantkit.verify.kv_scales import with_kv_scales
from quantkit.verify.loading import check_loading, loading_findings
from quantkit.verify.report import Finding, VerifyReport, first_findings
from quantkit.verify.structure import check_contract, check_files, check_specs, open_output
from quantkit.verify.thresholds import check_errors

_CHECKS = ("files", "index and headers", "config and tensors")
_DAMAGED = Finding(check="files", message="its sha256 is not the manifest's: the file is damaged")
_OTHER_SOURCE = Finding(
    check="source",
    message="is not the shard that the output was made from",
    remedy="give the checkpoint that was converted",
)
_PARTIAL = Finding(
    check="partial",
    message="the output of a smoke run (--limit-shards, --layers): no whole model, and never published",
    is_error=False,
    file=MANIFEST_NAME,
    remedy="convert without --limit-shards and --layers",
)
_FOREIGN = Finding(
    check="files",
    message="has no manifest of ours: hashes, errors and completeness are not looked at",
    is_error=False,
    file=MANIFEST_NAME,
)
_UNRECORDED = FileRecord(file_bytes=0, sha256="")
_MAX_FINDINGS = 50  # of one check


def verify_output(
    output: Path,
    *,
    source: Checkpoint | None = None,
    launch: Launch | None = None,
    is_fast: bool = False,
    num_jobs: int = 1,
    report_progress: ReportProgress = lambda _, __: None,
) -> VerifyReport:
    """Manifest, files, index, headers, config; and with the source every value, unless something is wrong before.

    ``launch``: whether that engine loads it; then a directory of another tool, without a manifest, is looked at too.
    ``is_fast`` leaves out whatever needs dequantizing. Raises VerificationError only where nothing can be checked (a
    missing or garbled manifest), SourceError for a bad source, or an output that is no directory.
    """
    if launch is not None and output.is_dir() and not (output / MANIFEST_NAME).is_file():
        return _verify_foreign(output, launch)
    manifest = read_manifest(output)
    origin = _origin(manifest)
    findings = list(first_findings(check_files(output, manifest.output_files), _MAX_FINDINGS))
    if origin.limits is not None:
        findings.append(_PARTIAL)
    is_reported = {finding.file for finding in findings}
    to_hash = {name: record for name, record in manifest.output_files.items() if name not in is_reported}
    findings += check_hashes(output, to_hash, wrong=_DAMAGED, num_jobs=num_jobs, report_progress=report_progress)
    checkpoint, more = open_output(output)
    report = VerifyReport(output=output, checks=_CHECKS, findings=(*findings, *more), num_tensors=0)
    if checkpoint is None:
        return report
    contract = check_contract(
        checkpoint,
        origin.family,
        allow_incomplete=bool(manifest.document.get("is_incomplete")),
        is_partial=origin.limits is not None,
    )
    report = report.with_findings(first_findings(contract, _MAX_FINDINGS))
    report = replace(report, num_tensors=len(checkpoint.tensors))
    if launch is not None:
        report = _with_engine(report, check_loading(checkpoint, origin.family, launch))
    if source is None or not report.is_good:
        return report
    report = replace(report, checks=(*report.checks, "plan" if is_fast else "source shards"))
    plan = with_kv_scales(origin.plan(source), manifest.document)
    if not is_fast:
        shards = plan.checkpoint.shards
        records = {shard.name: manifest.source_shards.get(shard.name, _UNRECORDED) for shard in shards}
        report = report.with_findings(
            check_hashes(
                source.directory, records, wrong=_OTHER_SOURCE, num_jobs=num_jobs, report_progress=report_progress
            )
        )
        if not report.is_good:  # what would follow is of another source, too
            return report
    report = report.with_findings(first_findings(check_specs(checkpoint, plan), _MAX_FINDINGS))
    if not report.is_good:
        return report
    comparison = compare_with_source(
        plan, checkpoint, is_fast=is_fast, num_jobs=num_jobs, report_progress=report_progress
    )
    has_importance = manifest.document.get("importance") is not None
    return _with_comparison(report, comparison, plan, is_fast=is_fast, has_importance=has_importance)


def _verify_foreign(directory: Path, launch: Launch) -> VerifyReport:
    """What another tool wrote: whether an engine loads it, and nothing else."""
    checkpoint = open_checkpoint(directory)
    family = family_of(checkpoint.config)
    report = VerifyReport(output=directory, checks=(), findings=(_FOREIGN,), num_tensors=len(checkpoint.tensors))
    return _with_engine(report, check_loading(checkpoint, family, launch))


def _with_engine(report: VerifyReport, engine: EngineReport) -> VerifyReport:
    found = first_findings(loading_findings(engine), _MAX_FINDINGS)
    return replace(report.with_findings(found), engine=engine, checks=(*report.checks, f"loading by {engine.engine}"))


def _with_comparison(
    report: VerifyReport, comparison: Comparison, plan: Plan, *, is_fast: bool, has_importance: bool
) -> VerifyReport:
    classes = class_errors(comparison.errors)
    thresholds = check_errors(comparison.errors, classes, plan.recipe, has_importance=has_importance)
    report = report.with_findings(comparison.findings[:_MAX_FINDINGS])
    return replace(
        report.with_findings(first_findings(thresholds, _MAX_FINDINGS)),
        checks=(*report.checks, "copied values" if is_fast else "every value"),
        classes=classes,
        errors=tuple(comparison.errors),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """Recipe, family and limits that a manifest records."""

    recipe: Recipe
    family: Family
    limits: Limits | None

    def plan(self, source: Checkpoint) -> Plan:
        """The plan that made the output."""
        plan = make_plan(self.recipe, self.family, source, allow_unmatched=True, allow_incomplete=True)
        if self.limits is None:
            return plan
        try:
            return limited(plan, self.limits)
        except UsageError as error:  # layers that this source does not have
            raise VerificationError(
                f"was made from another source ({error.message})", file=MANIFEST_NAME, remedy=_OTHER_SOURCE.remedy
            ) from error


def _origin(manifest: Manifest) -> _Origin:
    try:
        recipe = parse_recipe(dict(manifest.recipe), where=MANIFEST_NAME)
        limits = Limits.of(manifest.document.get("partial"))
        return _Origin(recipe=recipe, family=FAMILIES[str(manifest.document.get("family"))], limits=limits)
    except (RecipeError, TypeError, ValueError) as error:
        raise VerificationError(
            f"its recipe, family or limits are garbled ({error})", file=MANIFEST_NAME, remedy="convert again"
        ) from error
