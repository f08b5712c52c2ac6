"""What a file of second moments covers and has gained, as a JSON document tells it: rows for terminal and Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.cli import render
from quantkit.importance.cover import Cover

Document = Mapping[str, Any]
COVER_COLUMNS = ("part", "moments of its own", "few tokens", "its layer's", "none")
GAIN_COLUMNS = ("part", "weights", "weighed by importance", "the same without it")
_MOST_NAMES = 10


def cover_rows(importance: Document) -> Sequence[Sequence[str]]:
    """Weights by part, and how they are covered."""
    return [
        [role, *(render.count(counts[kind.value]) for kind in Cover)] for role, counts in importance["weights"].items()
    ]


def missing_texts(importance: Document) -> Sequence[str]:
    """Modules without moments, the first of them."""
    return [f"{name}: {count}" for name, count in importance["missing"].items()][:_MOST_NAMES]


def gains_title(importance: Document) -> str:
    """Whose errors the gains are."""
    return f"Relative error as inputs see it, of the first {importance['sample_rows']} rows"


def gain_rows(importance: Document) -> Sequence[Sequence[str]]:
    """The error that importance weighs, with it and without."""
    return [
        [
            role,
            render.count(error["num_weights"]),
            f"{error['relative_error']:.4f}",
            f"{error['without_importance']:.4f}",
        ]
        for role, error in importance["errors"].items()
    ]
