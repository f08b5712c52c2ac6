"""Shows what a file of second moments covers, and what it has gained."""

from pathlib import Path

from quantkit.cli import importance_text as text
from quantkit.cli import render


def show_importance(importance: text.Document, file: Path) -> None:
    """Weights by part and cover; modules without moments."""
    title = f"Importance: {importance['kind']}, {file.name}"
    render.show_table(title, text.COVER_COLUMNS, text.cover_rows(importance))
    render.show_notes("no moments", text.missing_texts(importance))


def show_gains(importance: text.Document) -> None:
    """The error that importance weighs, with it and without."""
    render.show_table(text.gains_title(importance), text.GAIN_COLUMNS, text.gain_rows(importance))
