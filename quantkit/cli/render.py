"""Draws results. The only importer of rich; tables and progress on a terminal, plain lines elsewhere."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

GIB = 2**30


def show_json(document: Mapping[str, Any]) -> None:
    """The one document of ``--json``."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def show_line(text: str) -> None:
    """A line of data."""
    sys.stdout.write(text + "\n")


def show_notes(kind: str, notes: Sequence[str]) -> None:
    """Warnings and remarks, one a line, to stderr."""
    for note in notes:
        sys.stderr.write(f"{kind}: {note}\n")


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; columns whose every cell is a number are aligned to the right."""
    if not rows:
        return
    if not sys.stdout.isatty() or os.environ.get("CI"):
        _show_plain_table(title, columns, rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if _is_numeric(rows, index) else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def gib(num_bytes: int) -> str:
    """Bytes as GiB (2**30), or in smaller units where that would read 0."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size or (unit == "GiB" and num_bytes >= GIB // 10):
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes} B"


def count(number: int) -> str:
    """A count with separators."""
    return f"{number:,}"


@contextmanager
def progress(label: str, total_bytes: int, *, is_quiet: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the bytes just done. Bytes per second and time left, on stderr."""
    if is_quiet or total_bytes == 0:
        yield lambda _: None
    elif sys.stderr.isatty() and not os.environ.get("CI"):
        yield from _bar(label, total_bytes)
    else:
        yield _plain_progress(label, total_bytes)


def _bar(label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda done: bar.advance(task, done)


def _plain_progress(label: str, total_bytes: int) -> Callable[[int], None]:
    started = time.monotonic()
    state = {"done": 0, "next": 10}

    def update(done: int) -> None:
        state["done"] += done
        percent = 100 * state["done"] // total_bytes
        if percent >= state["next"]:
            state["next"] = percent - percent % 10 + 10
            seconds = max(time.monotonic() - started, 1e-9)
            left = seconds * (total_bytes - state["done"]) / max(state["done"], 1)
            sys.stderr.write(
                f"{label}: {percent}% of {gib(total_bytes)}, "
                f"{state['done'] / seconds / 1e6:.0f} MB/s, {left:.0f} s left\n"
            )

    return update


def _is_numeric(rows: Sequence[Sequence[str]], index: int) -> bool:
    return all(row[index][:1].isdigit() or row[index] in {"", "-"} for row in rows)


def _show_plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    show_line(title)
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if _is_numeric(rows, index) else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        show_line(("  " + "  ".join(cells)).rstrip())
    show_line("")
