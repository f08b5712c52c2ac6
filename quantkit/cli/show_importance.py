"""Shows what a file of second moments covers, and what it has gained."""

from collections.abc import Sequence

from quantkit.cli import render
from quantkit.importance.cover import Cover, Importance
from quantkit.integrity.weighed_errors import SAMPLE_ROWS, ClassGain

_MOST_NAMES = 10


def show_importance(importance: Importance) -> None:
    """Weights by part and cover; modules without moments."""
    rows = [
        [role, *(render.count(counts[kind]) for kind in Cover)] for role, counts in sorted(importance.cover.items())
    ]
    columns = ["part", "moments of its own", "few tokens", "its layer's", "none"]
    render.show_table(f"Importance: {importance.file.kind}, {importance.file.path.name}", columns, rows)
    missing = list(importance.missing.items())[:_MOST_NAMES]
    render.show_notes("no moments", [f"{name}: {count}" for name, count in missing])


def show_gains(gains: Sequence[ClassGain]) -> None:
    """The error that importance weighs, with it and without."""
    rows = [[one.role, render.count(one.num_weights), f"{one.relative:.4f}", f"{one.plain:.4f}"] for one in gains]
    columns = ["part", "weights", "weighed by importance", "the same without it"]
    render.show_table(f"Relative error as inputs see it, of the first {SAMPLE_ROWS} rows", columns, rows)
