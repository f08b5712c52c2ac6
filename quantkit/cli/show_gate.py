"""Shows a comparison of evaluations as JSON or as a table."""

import sys
from pathlib import Path

from quantkit.cli import render
from quantkit.cli.gate_document import gate_document
from quantkit.cli.gate_text import columns, method_lines, needed_text, rows, verdict_text
from quantkit.cli.summary_file import add_summary
from quantkit.gate.gate import GateReport


def show_gate(report: GateReport, logs: tuple[Path, Path], *, as_json: bool, summary: Path | None) -> None:
    """Every task, the mean, the verdict and how it was found."""
    document = gate_document(report, logs)
    add_summary(summary, document)
    if as_json:
        render.show_json(document)
        return
    render.show_table(f"{logs[0]} -> {logs[1]}", columns(document), rows(document))
    render.show_notes("warning", report.warnings)
    for line in (*method_lines(document), needed_text(document)):
        if line:
            render.show_line(line)
    render.show_line(verdict_text(document))
    if not report.passes and not sys.stdout.isatty():  # where stdout goes elsewhere, stderr says it, too
        render.show_notes("quantkit", ["the gate is shut: " + verdict_text(document)])
