"""Shows the results of convert and verify as JSON or as tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.cli import documents, render
from quantkit.cli.show_importance import show_gains, show_importance
from quantkit.cli.show_loading import show_loading
from quantkit.cli.summary import calibration_text
from quantkit.cli.summary_file import add_summary
from quantkit.convert.convert import ConvertReport
from quantkit.convert.publish import PublishReport
from quantkit.convert.ranks import RankReport
from quantkit.engines.verdicts import Outcome
from quantkit.integrity.weight_errors import ClassError
from quantkit.machine import bytes_text, speed_text
from quantkit.verify.report import Finding, VerifyReport


def show_conversion(
    report: ConvertReport,
    published: PublishReport | None,
    *,
    is_new: bool,
    as_json: bool,
    summary: Path | None = None,
    command: str = "convert",
) -> None:
    """Sizes, errors by class, time, and where it was published; of an output that was there already only the last."""
    document = documents.convert_document(report, published, command)
    add_summary(summary, document)
    if as_json:
        render.show_json(document)
        return
    if is_new:
        _show_new(report, document)
    else:
        render.show_line(f"{report.output}: is complete already, and an output of this very command")
    if published is not None:
        whose = "public" if published.is_public else "private"
        render.show_line(
            f"{published.url}: {published.num_files} files, {bytes_text(published.num_bytes)}, {whose}, at commit "
            f"{published.commit[:12]} ({published.num_sent} files sent now)"
        )


def _show_new(report: ConvertReport, document: Mapping[str, Any]) -> None:
    plan = report.plan
    rows = [
        [
            part.role.value,
            part.action.value,
            render.count(part.num_weights),
            bytes_text(part.source_bytes),
            bytes_text(part.output_bytes),
        ]
        for part in plan.parts
    ]
    render.show_table(
        f"Converted to {report.output}", ["part", "action", "weights", "source size", "output size"], rows
    )
    _show_errors(report.classes)
    if plan.importance is not None:
        show_importance(document["importance"], plan.importance.file.path)
        show_gains(document["importance"])
    if document["calibration"] is not None:
        render.show_line(calibration_text(document["calibration"]))
    _show_findings(report.findings)
    render.show_notes("warning", plan.warnings)
    source_bytes = plan.checkpoint.num_bytes
    # of a run that ran a model the rate of its bytes says nothing
    rate = "" if report.calibration else f" ({speed_text(source_bytes, report.earlier_bytes, report.seconds)})"
    render.show_line(
        f"{report.output}: {bytes_text(source_bytes)} -> {bytes_text(plan.tensor_bytes)} in {report.seconds:.1f} s"
        f"{rate}, verified and in place"
    )


def show_card(output: Path, card: str, *, as_json: bool) -> None:
    """The card, as it is."""
    if as_json:
        render.show_json(documents.card_document(output, card))
    else:
        render.show_line(card.removesuffix("\n"))


def show_rank(report: RankReport, *, as_json: bool, summary: Path | None = None) -> None:
    """What a rank has made, and what comes next."""
    document = documents.rank_document(report)
    add_summary(summary, document)
    if as_json:
        render.show_json(document)
        return
    render.show_line(
        f"rank {report.rank} of {report.world_size}: {report.num_shards} shards with "
        f"{render.count(report.num_tensors)} tensors are done in {report.partial}; when all ranks are, the same "
        "command with --finalize instead of --rank and --world-size completes the output"
    )


def show_verification(report: VerifyReport, *, as_json: bool, summary: Path | None = None) -> None:
    """Findings and errors by class."""
    document = documents.verify_document(report)
    add_summary(summary, document)
    if as_json:
        render.show_json(document)
        return
    _show_errors(report.classes)
    if report.engine is not None:
        show_loading(report.engine, all_rows=True)
    _show_findings(report.findings)
    is_unknown = report.engine is not None and report.engine.worst is Outcome.UNKNOWN
    verdict = "BAD" if not report.is_good else "nothing is known to be wrong" if is_unknown else "good"
    render.show_line(
        f"{report.output}: {verdict} ({render.count(report.num_tensors)} tensors; checked: {', '.join(report.checks)})"
    )


def _show_errors(classes: Sequence[ClassError]) -> None:
    rows = [
        [
            one.role,
            render.count(one.num_weights),
            f"{one.relative:.4f}",
            f"{one.median:.4f}",
            f"{one.worst:.4f}",
            one.worst_name,
        ]
        for one in classes
    ]
    render.show_table("Relative error", ["part", "weights", "all", "median", "worst", "worst weight"], rows)


def _show_findings(findings: Sequence[Finding]) -> None:
    rows = [
        [
            "error" if finding.is_error else "warning",
            finding.check,
            finding.tensor or finding.file or "",
            finding.message,
        ]
        for finding in findings
    ]
    render.show_table("Findings", ["level", "check", "where", "what"], rows)
