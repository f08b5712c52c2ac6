"""Shows what an engine makes of a checkpoint, worst first."""

from quantkit.cli import render
from quantkit.engines.verdicts import EngineReport, Outcome


def show_loading(report: EngineReport, *, all_rows: bool = False) -> None:
    """A table of what does not simply load, or of everything; one line where all is well."""
    rows = [row for row in report.rows if all_rows or row.example.outcome is not Outcome.LOADS]
    render.show_table(
        f"{report.engine} {report.version}",
        ["modules", "number", "scheme", "verdict", "why", "remedy"],
        [
            [
                row.name,
                render.count(row.num_modules),
                row.example.scheme,
                row.example.outcome.value,
                row.example.message,
                row.example.remedy,
            ]
            for row in rows
        ],
    )
    if report.worst is Outcome.LOADS:
        render.show_line(f"{report.engine} {report.version} loads all {render.count(report.num_modules)} modules")
