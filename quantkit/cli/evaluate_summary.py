"""Markdown of the JSON document of `quantkit evaluate`."""

from collections.abc import Mapping
from typing import Any

from quantkit.cli import evaluate_text as text
from quantkit.cli.markdown import bullets, code, escaped, table

Document = Mapping[str, Any]


def evaluate_summary(document: Document) -> list[str]:
    """The verdict first; then predictions, layers, weights and sizes."""
    tables = (
        (text.FIGURE_COLUMNS, text.figure_rows(document)),
        (text.layer_columns(document), text.layer_rows(document)),
        (text.ERROR_COLUMNS, text.error_rows(document)),
        (text.SIZE_COLUMNS, text.size_rows(document)),
    )
    return [
        f"**{escaped(text.verdict_text(document))}**",
        "",
        f"{code(document['source'])} to {code(document['output'])}: {escaped(text.headline(document))}",
        *(
            line
            for columns, rows in tables
            for line in table(columns, [[escaped(cell) for cell in row] for row in rows])
        ),
        *bullets("Warnings", document["warnings"]),
    ]
