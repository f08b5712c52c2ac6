"""Draws results. The only importer of rich; tables and progress on a terminal, plain lines elsewhere."""

import os
import re
import sys
import time
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from quantkit.errors import ResourceError
from quantkit.machine import bytes_text

BROKEN_PIPE = 141
_BAR_WIDTH = 70
_COLOURS = {
    "weights": "blue",
    "copies": "cyan",
    "kv_used": "bold green",
    "kv_spare": "green",
    "overhead": "yellow",
    "context": "magenta",
    "free": "dim",
}

if TYPE_CHECKING:
    from quantkit.threads import ReportProgress, Stage


# Unicode categories of what moves a terminal's cursor, changes its colours, ends a line or turns text round
_NO_TEXT = {"Cc", "Cf", "Zl", "Zp"}


def printable(text: str) -> str:
    """Names come from files of other people: what is no text in them is spelled out. Newlines stay."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(_spelled(one) if one != "\n" and unicodedata.category(one) in _NO_TEXT else one for one in text)


def _spelled(one: str) -> str:
    """As JSON escapes it: two surrogates for what has more than 16 bits."""
    units = one.encode("utf-16-be", errors="surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


def warn(text: str) -> None:
    """A line to stderr. Where it cannot be written there is nobody left to tell."""
    try:
        sys.stderr.write(printable(" ".join(text.split("\n"))) + "\n")
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@contextmanager
def _to_stdout() -> Iterator[None]:
    """At once; a reader that has gone away ends the command, as SIGPIPE would, and a full disk is an error."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(BROKEN_PIPE)
        raise ResourceError(
            f"the output cannot be written ({error.strerror})", remedy="make room, or send it elsewhere"
        ) from error


def _write(text: str) -> None:
    with _to_stdout():
        sys.stdout.write(text)


def show_json(document: Mapping[str, Any]) -> None:
    """The one document of ``--json``."""
    import json

    is_ascii = not (sys.stdout.encoding or "").lower().startswith("utf")
    # what is no text stands between quotes there, where its JSON escape is the one that ``printable`` writes
    _write(printable(json.dumps(document, indent=2, ensure_ascii=is_ascii)) + "\n")


def show_line(text: str) -> None:
    """A line of data."""
    _write(printable(text) + "\n")


def show_notes(kind: str, notes: Sequence[str]) -> None:
    """Warnings and remarks, one a line, to stderr."""
    for note in notes:
        warn(f"{kind}: {note}")


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; columns whose every cell is a number are aligned to the right."""
    if not rows:
        return
    rows = [[cell.replace("\n", "\\n") for cell in row] for row in rows]  # a row is a line, whatever a name holds
    if not sys.stdout.isatty() or os.environ.get("CI"):
        _show_plain_table(title, columns, rows)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(printable(title)), title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if _is_numeric(rows, index) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    with _to_stdout():
        Console().print(table)


def show_bars(title: str, bars: Sequence[tuple[str, Sequence[tuple[str, str, float]]]], *, total: float) -> None:
    """Stacked bars of (name, kind, GiB), a letter for each stretch; what is beyond ``total`` GiB stands behind ``|``.

    Letters tell the stretches apart where there is no colour.
    """
    is_terminal = sys.stdout.isatty() and not os.environ.get("CI")
    scale = _BAR_WIDTH / max(total, *(sum(gib for _, _, gib in stack) for _, stack in bars))
    lines = [title]
    for label, stack in bars:
        cells, position = "", 0.0
        letters = bar_letters([name for name, _, _ in stack])
        for (_, kind, gib), letter in zip(stack, letters, strict=True):
            begin, position = round(position * scale), position + gib
            text = letter * (round(position * scale) - begin)
            cells += f"[{_COLOURS[kind]}]{text}[/]" if is_terminal and text else text
        end = round(total * scale)
        lines.append(f"  {label}")
        lines.append(f"  0 {cells}{' ' * (_BAR_WIDTH - round(position * scale))} {max(position, total):.1f}")
        lines.append(f"    {' ' * end}| {total:g} GiB of the GPU")
        legend = [f"{letter} {name} {gib:.2f}" for (name, _, gib), letter in zip(stack, letters, strict=True)]
        lines += [f"    {'  '.join(legend[start : start + 4])}" for start in range(0, len(legend), 4)]
    if not is_terminal:
        show_line("\n".join(lines) + "\n")
        return
    from rich.console import Console

    with _to_stdout():
        Console(highlight=False, soft_wrap=True).print("\n".join(lines) + "\n")


def bar_letters(names: Sequence[str]) -> list[str]:
    """A letter for each name: its first that is still free, a dot for what is free."""
    taken: list[str] = []
    for name in names:
        wanted = (
            "."
            if name == "free"
            else next(
                (
                    letter
                    for letter in (*name.upper(), *name.lower(), *"0123456789")
                    if letter.isalnum() and letter not in taken
                ),
                "#",
            )
        )
        taken.append(wanted)
    return taken


def count(number: int) -> str:
    """A count with separators."""
    return f"{number:,}"


@contextmanager
def progress(*, is_quiet: bool) -> "Iterator[ReportProgress]":
    """Yields a function of what goes on and the bytes just done. Bytes per second, or seconds a step, and time left, on
    stderr.

    They follow from what this run does, not from what it finds done.
    """
    if is_quiet:
        yield lambda _, __: None
    elif sys.stderr.isatty() and not os.environ.get("CI"):
        yield from _bar()
    else:
        yield _plain_progress()


def _bar() -> "Iterator[ReportProgress]":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    bytes_columns = (DownloadColumn(binary_units=True), TransferSpeedColumn())
    step_columns = (TextColumn("{task.percentage:.0f}%"), TextColumn("{task.fields[rate]}"))
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, visible=False, rate="")
        current: Stage | None = None
        started, num_steps = 0.0, 0

        def update(stage: "Stage", done: int) -> None:
            nonlocal current, started, num_steps
            if stage != current:
                current, started, num_steps = stage, time.monotonic(), 0
                told = step_columns if stage.step else bytes_columns
                bar.columns = (TextColumn("{task.description}"), BarColumn(), *told, TimeRemainingColumn())
                earlier, total = stage.earlier_bytes, stage.total_bytes
                bar.reset(task, total=total, completed=earlier, description=stage.label, visible=True, rate="")
            num_steps += done > 0
            bar.update(task, advance=done, rate=_step_rate(stage, num_steps, time.monotonic() - started))

        yield update


def _step_rate(stage: "Stage", num_steps: int, seconds: float) -> str:
    """How long this run takes for a step; empty before the first."""
    return f"{seconds / num_steps:.1f} s a {stage.step}" if num_steps else ""


def _plain_progress() -> "ReportProgress":
    """A line for each tenth: what survives in a log file."""
    current: Stage | None = None
    started, done_bytes, num_steps, next_percent = 0.0, 0, 0, 0

    def update(stage: "Stage", done: int) -> None:
        nonlocal current, started, done_bytes, num_steps, next_percent
        all_bytes = max(stage.total_bytes, 1)
        of_all = "" if stage.step else f" of {bytes_text(stage.total_bytes)}"
        if stage != current:
            current, started, done_bytes, num_steps = stage, time.monotonic(), 0, 0
            percent = 100 * stage.earlier_bytes // all_bytes
            next_percent = percent - percent % 10 + 10
            if stage.earlier_bytes:
                warn(f"{stage.label}: goes on from {percent}%{of_all}")
        done_bytes += done
        num_steps += done > 0
        percent = 100 * (stage.earlier_bytes + done_bytes) // all_bytes
        if percent >= next_percent:
            next_percent = percent - percent % 10 + 10
            seconds = max(time.monotonic() - started, 1e-9)
            left = seconds * (stage.total_bytes - stage.earlier_bytes - done_bytes) / max(done_bytes, 1)
            if stage.num_steps:  # layers take as long as each other, whatever their bytes
                left = seconds * (stage.num_steps - num_steps) / max(num_steps, 1)
            rate = _step_rate(stage, num_steps, seconds) if stage.step else f"{done_bytes / seconds / 1e6:.0f} MB/s"
            told = f", {rate}, {left:.0f} s left" if done_bytes * 100 >= all_bytes else ""
            warn(f"{stage.label}: {percent}%{of_all}{told}")

    return update


def _is_numeric(rows: Sequence[Sequence[str]], index: int) -> bool:
    return all(re.fullmatch(r"[\d.,]+%?( [KMG]?i?B)?|-?", row[index]) for row in rows)


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
