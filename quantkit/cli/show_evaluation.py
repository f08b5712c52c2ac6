"""Shows an evaluation as JSON, as tables and as a page."""

from pathlib import Path
from typing import Any

from quantkit.cli import evaluate_text as text
from quantkit.cli import render
from quantkit.cli.evaluate_page import PAGE_BEGIN, evaluate_page
from quantkit.cli.page_file import write_page
from quantkit.cli.summary_file import add_summary


def show_evaluation(document: dict[str, Any], *, page: Path | None, as_json: bool, summary: Path | None) -> None:
    """Predictions, layers, weights, sizes, verdict."""
    if page is not None:
        write_page(page, evaluate_page(document), is_ours=PAGE_BEGIN, option="--report")
    add_summary(summary, document)
    if as_json:
        render.show_json(document)
    else:
        render.show_line(f"{document['source']} -> {document['output']}: {text.headline(document)}\n")
        render.show_table("Predictions", text.FIGURE_COLUMNS, text.figure_rows(document))
        render.show_table("Relative errors by layer", text.layer_columns(document), text.layer_rows(document))
        render.show_table("Weights", text.ERROR_COLUMNS, text.error_rows(document))
        render.show_table("Sizes", text.SIZE_COLUMNS, text.size_rows(document))
        render.show_line(text.verdict_text(document))
    render.show_notes("warning", document["warnings"])
    render.show_notes("quantkit", document["failures"])
