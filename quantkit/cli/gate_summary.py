"""Markdown of the JSON document of `quantkit gate`."""

from collections.abc import Mapping
from typing import Any

from quantkit.cli.gate_text import NUM_LEFT, columns, method_lines, needed_text, rows, verdict_text
from quantkit.cli.markdown import bullets, code, escaped, table

Document = Mapping[str, Any]


def gate_summary(document: Document) -> list[str]:
    """The verdict first; then every task, and how it was found."""
    cells = [[escaped(cell) for cell in row] for row in rows(document)]
    needed = needed_text(document)
    return [
        f"**{escaped(verdict_text(document))}**",
        "",
        f"{code(document['baseline'])} to {code(document['candidate'])}",
        *table([escaped(one) for one in columns(document)], cells, num_left=NUM_LEFT),
        *([escaped(needed), ""] if needed else []),
        *bullets("How", method_lines(document)),
        *bullets("Warnings", document["warnings"]),
    ]
