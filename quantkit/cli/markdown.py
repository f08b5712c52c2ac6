"""Markdown around what others wrote: no markup, link, HTML, table cell or line of theirs comes through."""

import re
from collections.abc import Iterable, Sequence

from quantkit.cli import render

MOST_LINES = 50  # of a table or a list: GitHub takes 1 MiB a step
_MOST_CHARACTERS = 500
_MARKUP = re.compile(
    r"[\\`*\[\]<>&|~#@$]"
    r"|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"  # within a word it is none
    r"|(?<=www)\.|:(?=//)|(?<=mailto):|(?<=xmpp):"
    r"|^[-+](?= |$)|^-(?=[- ]+$)|^=",
    re.IGNORECASE,
)
_NUMBERING = re.compile(r"^(\d+)[.)](?= |$)")


def escaped(text: str) -> str:
    """One line that shows as it is: what could be markup is an entity, which no Markdown takes for structure."""
    line = " ".join(render.printable(text).split())
    line = line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."
    line = _MARKUP.sub(lambda match: f"&#{ord(match[0])};", line)
    return _NUMBERING.sub(lambda match: f"{match[1]}&#{ord(match[0][-1])};", line)


def code(text: str) -> str:
    """A name."""
    return f"<code>{escaped(text)}</code>" if text else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1) -> list[str]:
    """Lines of a table whose cells are Markdown already; the first ``num_left`` columns are aligned to the left."""
    cells = list(rows)
    if not cells:
        return []
    rule = ["---" if index < num_left else "---:" for index in range(len(columns))]
    lines = [f"| {' | '.join(row)} |" for row in (columns, rule, *cells[:MOST_LINES])]
    return ["", *lines, *_rest(cells), ""]


def bullets(title: str, items: Iterable[str]) -> list[str]:
    """A titled list of what others wrote."""
    texts = [text for item in items if (text := escaped(item))]
    if not texts:
        return []
    return ["", f"{title}:", "", *(f"- {text}" for text in texts[:MOST_LINES]), *_rest(texts), ""]


def _rest(items: Sequence[object]) -> list[str]:
    return ["", f"({len(items) - MOST_LINES} more)"] if len(items) > MOST_LINES else []
